"""Rotations and gates with gradients, one kernel each way. For training alone: it does not travel."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blr.kernels.common.available import TRAINED, kernels_on
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import ContextOf
from blr.kernels.fused.launch import by_token, fits, rotated, turned_back
from blr.kernels.fused.reference import GATES, rotate

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
        from blr.kernels.fused.triton import gated_kernel

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
        from blr.kernels.fused.triton import gated_back_kernel

        gate, up = ctx.saved_tensors
        made = torch.empty_like(gate), torch.empty_like(up)
        constants = {"MAKE": ctx.more, "BLOCK": BLOCK}
        given = (gate, up, g.contiguous(), *made, gate.numel())
        launch(gated_back_kernel, (_programs(gate),), given, constants, num_warps=WARPS)
        return *made, None


def _programs(x: Tensor) -> int:
    return -(-x.numel() // BLOCK)


def rotated_with_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As of `reference.rotate`, differentiable in queries and keys.

    Args:
        q: [B, H, T, D], k: [B, K, T, D], cos, sin: [B or 1, T, D], of one dtype and device.
    """
    if not kernels_on(q.device) or q.dtype not in TRAINED or not fits(q, k, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin)
    return _Rotated.apply(q, k, cos, sin)


class _Rotated(torch.autograd.Function):
    """`rotated`; it keeps cosines and sines alone, which all layers share."""

    @staticmethod
    def forward(
        ctx: ContextOf[tuple[bool, bool]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.more = by_token(q), by_token(k)  # gradients go where projections take them from
        return rotated(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: ContextOf[tuple[bool, bool]], q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *turned_back(q, k, cos, sin, ctx.more), None, None
