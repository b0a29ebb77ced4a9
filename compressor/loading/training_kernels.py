"""Models in training whose rotations, gates and root-mean-square norms are one kernel each way.

In transformers they are a dozen kernels each with those of the gradient, some over features that do not
lie together: for small models a third of a step's time on a GPU, and norms take longer than products.
Modules keep their class and their tensors; `forward` is one of their own, as the native one under
`torch.compile`, tracing and autocast, where kernels do not run, and for rotations of a part of the
features. Norms are torch's fused operator; one that computes anything else (Gemma's 1 + weight) stays.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.fused import (
    FusedGate,
    behind_renaming,
    calls_rotation,
    is_renamed,
    is_whole,
    rotating,
)
from blr.compressor.modeling.probes import gate_of, norm_of
from blr.kernels.common.available import TRAINED, kernel_device
from blr.kernels.fused.gradient import gated_with_gradient, rotated_with_gradient


def fuse_trained(model: nn.Module) -> None:
    """Let attention, gated MLPs and norms of `model` compute, with gradients or without, by kernels."""
    for module in model.modules():
        kind: Any = type(module)
        forward = kind.native.forward if isinstance(module, Extension) else kind.forward
        make = module.fused_gate if isinstance(module, FusedGate) else gate_of(module)
        if calls_rotation(forward):
            module.forward = partial(_attend, module, forward)
        elif make is not None:
            module.forward = partial(_gate, module, make)
        elif (norm := norm_of(module)) is not None and norm[0] == "rms":
            module.forward = partial(_norm, module, forward, norm[1])


def _attend(attention: object, native: Callable[..., object], *args: object, **kwargs: object) -> object:
    inner = behind_renaming(native)
    if torch.compiler.is_compiling() or is_renamed(inner, kwargs):
        return native(attention, *args, **kwargs)
    return rotating(inner, _trained)(attention, *args, **kwargs)


def _trained(native: Callable[..., object]) -> object:
    def rotation(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object
    ) -> object:
        fixed = isinstance(cos, Tensor) and not (cos.requires_grad or sin.requires_grad)
        fused = fixed and _is_fused(q, k, cos, sin) and is_whole(q, cos)
        if args or kwargs or not fused:
            return native(q, k, cos, sin, *args, **kwargs)
        return rotated_with_gradient(q, k, cos, sin)

    return rotation


def _gate(mlp: Any, make: str, x: Tensor) -> object:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if _is_fused(gate, up) and gate.shape == up.shape:
        return mlp.down_proj(gated_with_gradient(gate, up, make))
    return mlp.down_proj(mlp.act_fn(gate) * up)


def _norm(
    norm: Any, native: Callable[..., object], eps: float, x: Tensor, *args: object, **kwargs: object
) -> object:
    if args or kwargs:  # a gated norm with its gate
        return native(norm, x, *args, **kwargs)
    return rms_norm(x, norm.weight.shape, norm.weight, eps)


def _is_fused(*tensors: Tensor) -> bool:
    """Whether kernels compute with these, and nobody but autograd looks on."""
    if torch.compiler.is_compiling() or not all(type(t) is Tensor for t in tensors):
        return False
    first = tensors[0]
    alike = all(t.dtype == first.dtype and t.device == first.device for t in tensors)
    watched = torch._C._is_any_autocast_enabled() or torch._C._is_tracing()
    return alike and not watched and first.dtype in TRAINED and kernel_device(first)
