"""Launches the rotation of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.launching import launch
from blr.kernels.rotary.reference import rotate

HEADS = 16  # of a token at once
WIDEST = 512  # features of a head
MOST = (1 << 16) - 1  # sequences that a grid has room for


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As of `reference.rotate`, without gradients; results lie in memory as q and k do.

    Args:
        q: [B, H, T, D], k: [B, K, T, D], cos, sin: [B or 1, T, D], of one dtype and device.
    """
    if not kernels_on(q.device) or not _fits(q, k, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin)
    from blr.kernels.rotary.triton import rotary_kernel

    (batch, heads, tokens, width), made = q.shape, (torch.empty_like(q), torch.empty_like(k))
    places = [t.stride(n) for t in (q, k) for n in (0, 2, 1)]
    places += [cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)]
    places += [t.stride(n) for t in made for n in (0, 2, 1)]
    given = (q, k, cos, sin, *made, heads, k.shape[1], *places)
    half = width // 2
    constants = {"HALF": half, "BLOCK": 1 << (half - 1).bit_length(), "HEADS": HEADS}
    launch(rotary_kernel, (tokens, batch), given, constants, num_warps=4)
    return made


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, width = q.shape
    same = k.shape[0] == batch and k.shape[2:] == q.shape[2:] and cos.shape[1:] == (tokens, width)
    same = same and cos.shape[0] in (1, batch) and cos.stride() == sin.stride()
    sized = width % 2 == 0 and width <= WIDEST and 0 < batch <= MOST and q.numel() > 0 < k.numel()
    return same and sized and all(t.stride(-1) == 1 for t in (q, k, cos, sin))
