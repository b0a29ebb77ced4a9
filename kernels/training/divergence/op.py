"""The divergence of rows of logits with its gradient, by one kernel where kernels run."""

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.common.registration import ContextOf
from blr.kernels.training.divergence.reference import divergence_sum as reference


def divergence_sum(student: Tensor, teacher: Tensor, alone: bool = False) -> Tensor:
    """As of `reference.divergence_sum`; differentiable in `student`.

    Args:
        alone: only the gradient of the sum itself will be asked for, not of a multiple: to multiply it
            would read and write all logits once more.
    """
    if student.requires_grad and kernel_device(student) and not torch.compiler.is_compiling():
        found: Tensor = _Divergence.apply(student, teacher, alone)
        return found
    return reference(student, teacher)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: ContextOf[bool], student: Tensor, teacher: Tensor, alone: bool) -> Tensor:
        from blr.kernels.training.divergence.triton import divergence

        lost, gradient = divergence(student, teacher)
        ctx.save_for_backward(gradient)
        ctx.more = alone
        return lost.sum()

    @staticmethod
    def backward(ctx: ContextOf[bool], g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient if ctx.more else gradient.mul_(g), None, None  # it is asked for once
