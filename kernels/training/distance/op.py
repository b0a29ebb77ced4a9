"""The relative distance of rows of states with its gradient, by one kernel each where kernels run."""

from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import TRAINED, kernel_device
from blr.kernels.common.registration import Context
from blr.kernels.training.distance import reference


def relative_errors(mine: Tensor, wanted: Tensor) -> Tensor:
    """‖h − h'‖² / ‖h'‖² [...] (float32) of states [..., d], of which no copy is kept for the gradient;
    differentiable in `mine`."""
    found: Tensor = _Relative.apply(mine, wanted)
    return found


class _Relative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, mine: Tensor, wanted: Tensor) -> Tensor:
        found, size = _module(mine, wanted).distances(mine, wanted)
        ctx.save_for_backward(mine, wanted, size)
        return found

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None]:
        mine, wanted, size = ctx.saved_tensors
        return _module(mine, wanted).distances_back(mine, wanted, size, g), None


def _module(mine: Tensor, wanted: Tensor) -> Any:
    """What compares such states: the module of the kernels or that in plain torch."""
    taken = mine.dtype in TRAINED and wanted.dtype in TRAINED and kernel_device(mine)
    if not taken or torch.compiler.is_compiling():
        return reference
    from blr.kernels.training.distance import triton

    return triton
