"""The divergence of rows of logits with its gradient, by one kernel where kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.divergence.reference import divergence_sum as reference


def divergence_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """As of `reference.divergence_sum`; differentiable in `student`."""
    if student.requires_grad and kernel_device(student) and not torch.compiler.is_compiling():
        found: Tensor = _Divergence.apply(student, teacher)
        return found
    return reference(student, teacher)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        from blr.kernels.divergence.triton import divergence

        lost, gradient = divergence(student, teacher)
        ctx.save_for_backward(gradient)
        return lost.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(g), None  # it is asked for once
