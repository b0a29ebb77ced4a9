"""Whether somebody looks on at a product: a trace, autograd, autocast."""

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether this call is written down for a runtime that has no operators of ours.

    `torch.compile` is none; both exporters to ONNX go through one of the two.
    """
    if torch.compiler.is_compiling():
        # `is_exporting` itself is true inside torch.compile before torch 2.12
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    return torch.jit.is_tracing()


def is_unwatched(x: Tensor) -> bool:
    """Whether nobody looks on at a product of x: no gradients, tracing, autocast or class of tensors."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._is_tracing()
    )
