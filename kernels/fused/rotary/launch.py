"""Launches the rotation of queries and keys."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.launching import launch
from blr.kernels.common.replay import Launches
from blr.kernels.fused.rotary.reference import rotate

HEADS = 16  # of a token at once
WIDEST = 512  # features of a head
MOST = (1 << 16) - 1  # sequences that a grid has room for


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As of `reference.rotate`, without gradients; results lie in memory as q and k do.

    Args:
        q: [B, H, T, D], k: [B, K, T, D], cos, sin: [B or 1, T, D], of one dtype and device.
    """
    key = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in (q, k, cos, sin)])
    run = _PLANS.get(key)
    if run is None:
        run = _PLANS.keep(key, _plan(q, k, cos, sin))
    return run(q, k, cos, sin)


_PLANS = Plans()


def _plan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """What rotates all tensors that lie like these."""
    if not kernels_on(q.device) or not fits(q, k, cos, sin):
        return _plain
    order = by_token(q), by_token(k)
    launches = Launches(partial(_launched, order=order))
    return lambda *given: _heads(launches(*given), order)


def turned_back(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, order: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys by the kernel.

    Args:
        q: [B, H, T, D], k: [B, K, T, D], gradients of what `rotated` made of tensors that `fits`. order:
            whether a token's heads are to lie together, of either result.
    """
    q, k = (g if g.stride(-1) == 1 else g.contiguous() for g in (q, k))
    return _heads(_launched(q, k, cos, sin, order, back=True), order)


def _plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def by_token(x: Tensor) -> bool:
    """Whether a token's heads lie together."""
    return x.stride(1) < x.stride(2)


def _launched(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, order: tuple[bool, bool], back: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries and keys, [B, T, H, D] where `order` says so, else [B, H, T, D]. back: of gradients."""
    from blr.kernels.fused.rotary.triton import rotary_kernel

    heads, tokens = q.shape[1:3]
    made = tuple([_empty(x, together) for x, together in zip((q, k), order, strict=True)])
    places = [t.stride(n) for t in (q, k) for n in (0, 2, 1)]
    places += [cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)]
    for y, together in zip(made, order, strict=True):
        places += [y.stride(n) for n in ((0, 1, 2) if together else (0, 2, 1))]
    given = (q, k, cos, sin, *made, heads, k.shape[1], *places)
    half = q.shape[3] // 2
    block = 1 << (half - 1).bit_length()
    constants = {"HALF": half, "BLOCK": block, "HEADS": HEADS, "BACK": back}
    launch(rotary_kernel, (tokens, len(q)), given, constants, num_warps=4)
    return made[0], made[1]


def _empty(x: Tensor, together: bool) -> Tensor:
    batch, heads, tokens, width = x.shape
    shape = (batch, tokens, heads, width) if together else x.shape
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _heads(made: tuple[Tensor, Tensor], order: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """[B, H, T, D] of both."""
    q, k = made
    return q.transpose(1, 2) if order[0] else q, k.transpose(1, 2) if order[1] else k


def fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether tensors lie as the kernel takes them."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, width = q.shape
    same = k.shape[0] == batch and k.shape[2:] == q.shape[2:] and cos.shape[1:] == (tokens, width)
    same = same and cos.shape[0] in (1, batch) and cos.stride() == sin.stride()
    sized = width % 2 == 0 and width <= WIDEST and 0 < batch <= MOST and q.numel() > 0 < k.numel()
    return same and sized and all(t.stride(-1) == 1 for t in (q, k, cos, sin))
