"""The rotation of queries and keys with its gradient, one kernel each way. For training alone: it does
not travel."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blr.kernels.common.available import TRAINED, kernels_on
from blr.kernels.common.registration import ContextOf
from blr.kernels.fused.rotary.launch import by_token, fits, rotated, turned_back
from blr.kernels.fused.rotary.reference import rotate


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
