"""The product of an MLP's gate with its gradient, one kernel each way. For training alone: it does
not travel."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blr.kernels.common.available import TRAINED, kernels_on
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import ContextOf
from blr.kernels.fused.gated.reference import GATES

BLOCK = 1024  # numbers of a program: eight of half precision a thread
WARPS = 4
MOST = (1 << 31) - BLOCK  # numbers that are counted in 32 bits


def gated_with_gradient(gate: Tensor, up: Tensor, make: str) -> Tensor:
    """As of `reference.GATES[make]`, [..., K], differentiable.

    Args:
        gate, up: [..., K] of one shape, dtype and device. make: a name in `GATES`.
    """
    if not kernels_on(gate.device) or gate.dtype not in TRAINED or not 0 < gate.numel() <= MOST:
        return GATES[make](gate, up)
    return _Gated.apply(gate.contiguous(), up.contiguous(), make)


class _Gated(torch.autograd.Function):
    """Of tensors without gaps, which alone are kept: their rows are taken as one."""

    @staticmethod
    def forward(ctx: ContextOf[str], gate: Tensor, up: Tensor, make: str) -> Tensor:
        from blr.kernels.fused.gated.triton import gated_kernel

        ctx.save_for_backward(gate, up)
        ctx.more = make
        y = torch.empty_like(gate)
        constants = {"MAKE": make, "BLOCK": BLOCK}
        given = (gate, up, y, gate.numel(), 0, 0)
        launch(gated_kernel, (_programs(gate), 1), given, constants, num_warps=WARPS)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: ContextOf[str], g: Tensor) -> tuple[Tensor, Tensor, None]:
        from blr.kernels.fused.gated.triton_back import gated_back_kernel

        gate, up = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        constants = {"MAKE": ctx.more, "BLOCK": BLOCK}
        given = (gate, up, g.contiguous(), *made, gate.numel())
        launch(gated_back_kernel, (_programs(gate),), given, constants, num_warps=WARPS)
        return *made, None


def _programs(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)
