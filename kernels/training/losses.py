"""Losses of healing and fits with their gradients, by one kernel each where kernels run."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from blr.kernels.common.available import TRAINED, kernel_device
from blr.kernels.common.registration import Context, ContextOf

LEAST = 1e-12  # of what a distance is divided by: rows of zeros


def relative_errors(mine: Tensor, wanted: Tensor) -> Tensor:
    """‖h − h'‖² / ‖h'‖² [...] (float32) of states [..., d], of which no copy is kept for the gradient;
    differentiable in `mine`."""
    found: Tensor = _Relative.apply(mine, wanted)
    return found


class _Relative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, mine: Tensor, wanted: Tensor) -> Tensor:
        found, size = _functions(mine, wanted)[0](mine, wanted)
        ctx.save_for_backward(mine, wanted, size)
        return found

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None]:
        mine, wanted, size = ctx.saved_tensors
        return _functions(mine, wanted)[1](mine, wanted, size, g), None


def _functions(
    mine: Tensor, wanted: Tensor
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """`distances` and `distances_back` for such states, by kernels or those here."""
    taken = mine.dtype in TRAINED and wanted.dtype in TRAINED and kernel_device(mine)
    if not taken or torch.compiler.is_compiling():
        return distances, distances_back
    from blr.kernels.training import distance

    return distance.distances, distance.distances_back


def distances(mine: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """‖h − h'‖² / ‖h'‖² and ‖h'‖², [...] in float32, of rows of states [..., d]."""
    size = wanted.float().square().sum(-1).clamp_min(LEAST)
    return (mine.float() - wanted).square().sum(-1) / size, size


def distances_back(mine: Tensor, wanted: Tensor, size: Tensor, g: Tensor) -> Tensor:
    """The gradient 2 g (h − h') / ‖h'‖² of h, in its dtype; size: from `distances`, g: [...]."""
    return (mine.float() - wanted).mul_((2 * g / size)[..., None]).to(mine.dtype)


def divergence_sum(student: Tensor, teacher: Tensor, alone: bool = False) -> Tensor:
    """Σ KL(teacher ‖ student) in nats over rows of logits [n, v], in float32.

    It is differentiable in `student`.

    Args:
        alone: only the gradient of the sum itself will be asked for, not of a multiple: to multiply it
            would read and write all logits once more.
    """
    if student.requires_grad and kernel_device(student) and not torch.compiler.is_compiling():
        found: Tensor = _Divergence.apply(student, teacher, alone)
        return found
    log_p, log_q = (log_softmax(x, -1, dtype=torch.float32) for x in (teacher, student))
    return kl_div(log_q, log_p, reduction="sum", log_target=True)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: ContextOf[bool], student: Tensor, teacher: Tensor, alone: bool) -> Tensor:
        from blr.kernels.training.divergence import divergence

        lost, gradient = divergence(student, teacher)
        ctx.save_for_backward(gradient)
        ctx.more = alone
        return lost.sum()

    @staticmethod
    def backward(ctx: ContextOf[bool], g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient if ctx.more else gradient.mul_(g), None, None  # it is asked for once
