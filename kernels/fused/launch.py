"""Launches rotations, gates, norms and activations of products, one kernel each, without gradients."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from blr.kernels.common.available import HALF, kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import rows
from blr.kernels.common.replay import Launches
from blr.kernels.decode.gemm.launch import bmm, tma_ready
from blr.kernels.fused.reference import GATES, rotate

MOST = (1 << 16) - 1  # sequences or rows that a grid has room for
PRODUCTS = 1024  # tokens from which `activated` was measured to win (scripts/log)
RANKS = 768  # k up to which: above, its product takes longer than the library's
WARPS = 8  # of its programs, of 128 x 128: up to a seventh faster than 4
GATED = 1024  # columns of a program of `gated`: eight of half precision a thread
WIDEST = 4096  # features of `layer_norm`, all in registers
LEAST = 1 << 21  # numbers from which the GPU's time counts: torch's own kernel takes less of the host
NORMED = 4096  # numbers of a program
HEADS = 16  # of a token at once that `rotated` turns
WIDTH = 512  # features of a head
OVER: dict[str, Callable[[Tensor], Tensor]] = {
    **{"gelu": torch.ops.aten.gelu_, "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh")},
    **{"silu": torch.ops.aten.silu_, "relu": torch.relu_},
}
Rotated = tuple[Tensor, Tensor]
_PLANS: Plans[Callable[..., Tensor]] = Plans()
_ROTATIONS: Plans[Callable[..., Rotated]] = Plans()


def activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``φ(x weightᵀ + bias)``, contiguous: by one kernel where that is faster, else the library's
    product, written over.

    Apart, the product writes ``x Wᵀ + b`` and the activation reads and writes all of it again. That
    takes as long as the product where k is a rank (scripts/log).

    Args:
        x: [..., k], weight: [m, k], bias: [m] or None. activation: a name in `OVER`.
    """
    lies = None if bias is None else bias.stride()
    key = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device, activation, lies)
    run = _PLANS.get(key) or _PLANS.keep(key, _activated_plan(x, weight, bias, activation))
    return run(x, weight, bias)


def _activated_plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Callable[..., Tensor]:
    """What computes it for all tensors that lie like these."""
    k = x.shape[-1]
    fits = 0 < k <= RANKS and x.numel() // k >= PRODUCTS and (bias is None or bias.stride() == (1,))
    fits = fits and kernels_on(x.device) and x.dtype == weight.dtype in HALF
    if not fits or not tma_ready(rows(x)[None], weight.mT[None]):
        return lambda x, weight, bias: OVER[activation](functional.linear(x, weight, bias))
    return Launches(partial(_activated, activation=activation))


def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    shift = None if bias is None else bias[None]
    bmm(rows(x)[None], weight.mT[None], rows(y)[None], shift, activation=activation, num_warps=WARPS)
    return y


def gated(gate: Tensor, up: Tensor, make: str) -> Tensor:
    """As of `reference.GATES[make]`, [..., K], contiguous.

    Args:
        gate, up: [..., K] of one shape, dtype and device. make: a name in `GATES`.
    """
    key = (gate.shape, gate.stride(), gate.dtype, gate.device, up.stride(), up.dtype, up.device, make)
    run = _PLANS.get(key) or _PLANS.keep(key, _gated_plan(gate, up, make))
    return run(gate, up)


def _gated_plan(gate: Tensor, up: Tensor, make: str) -> Callable[..., Tensor]:
    """What computes it for all tensors that lie like these."""
    n = gate.numel() // max(gate.shape[-1], 1)
    lies = gate.stride(-1) == up.stride(-1) == 1
    if not kernels_on(gate.device) or not 0 < n <= MOST or not lies:
        return GATES[make]
    return Launches(partial(_gated, make=make))


def _gated(gate: Tensor, up: Tensor, make: str) -> Tensor:
    from blr.kernels.fused.triton import gated_kernel

    left, right = rows(gate), rows(up)
    n, K = left.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    given = (left, right, y, K, left.stride(0), right.stride(0))
    constants = {"MAKE": make, "BLOCK": GATED}
    launch(gated_kernel, (-(-K // GATED), n), given, constants, num_warps=4)
    return y


def is_faster(x: Tensor) -> bool:
    """Whether the kernel takes x [..., K], and less time than torch's."""
    sized = x.numel() >= LEAST and x.shape[-1] <= WIDEST
    return sized and x.dtype in HALF and kernels_on(x.device)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last axis.

    Args:
        x: [..., K]; weight, bias: [K], of one dtype and device.
    """
    if not is_faster(x) or x.stride(-1) != 1:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    from blr.kernels.fused.triton import layer_norm_kernel

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, x.shape[-1])
    n, K = flat.shape
    block = 1 << (K - 1).bit_length()
    given = (flat, weight, weight if bias is None else bias, y, n, K, eps, flat.stride(0), K)
    constants = {"BIAS": bias is not None, "ROWS": max(NORMED // block, 1), "BLOCK": block}
    launch(layer_norm_kernel, (-(-n // constants["ROWS"]),), given, constants, num_warps=8)
    return y


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As of `reference.rotate`: results lie in memory as q and k do.

    Args:
        q: [B, H, T, D], k: [B, K, T, D], cos, sin: [B or 1, T, D], of one dtype and device.
    """
    key = tuple([(t.shape, t.stride(), t.dtype, t.device) for t in (q, k, cos, sin)])
    run = _ROTATIONS.get(key) or _ROTATIONS.keep(key, _rotated_plan(q, k, cos, sin))
    return run(q, k, cos, sin)


def _rotated_plan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Callable[..., Rotated]:
    """What rotates all tensors that lie like these."""
    if not kernels_on(q.device) or not fits(q, k, cos, sin):
        return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))
    order = by_token(q), by_token(k)
    launches = Launches(partial(_rotated, order=order))
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
    return _heads(_rotated(q, k, cos, sin, order, back=True), order)


def by_token(x: Tensor) -> bool:
    """Whether a token's heads lie together."""
    return x.stride(1) < x.stride(2)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, order: tuple[bool, bool], back: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries and keys, [B, T, H, D] where `order` says so, else [B, H, T, D]. back: of gradients."""
    from blr.kernels.fused.triton import rotary_kernel

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
    sized = width % 2 == 0 and width <= WIDTH and 0 < batch <= MOST and q.numel() > 0 < k.numel()
    return same and sized and all(t.stride(-1) == 1 for t in (q, k, cos, sin))
