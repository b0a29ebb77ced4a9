"""First stage of BLAST with its mix, weights quantized: as in kernels/gemv/grouped.py.

    y[n, k, r] = Σ_l s[k, l, r] (w[l, r, :] · norm(x)[n, l, :])

A program owns a few ranks of all blocks. The tile of packed weights is that of `triton.py` with the
quads of all blocks in one axis. S is in full precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.quantized.triton import rows_by_fma, whole_sum
from blr.kernels.quantized.words import field_columns, load_chunk


@triton.jit
def mixed_rows(
    chunk, words, scales, x, gain, eps, s_tile, K, blocks,
    L: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token: [BR, L] in float32, ranks by output blocks.

    chunk, words, scales: as `load_chunk` has them. s_tile: [rank, k, l] in float32.
    """
    LANES: tl.constexpr = L * BQ
    block = tl.arange(0, LANES * 4) // (4 * BQ)
    at = field_columns(LANES, BQ, BITS)
    x_at = x + (block * K + at)
    inputs = x_at, x_at, gain + (block * K + at), tl.where(block < blocks, at - K, at)
    end = tl.cdiv(K, 128) * BITS
    sums, _, square, _ = rows_by_fma(chunk, words, scales, inputs, end, 1, BQ, BITS, NORM, False)
    z = tl.sum(tl.reshape(sums, (sums.shape[0], L, BQ)), 2)
    mixed = tl.sum(s_tile * z[:, None, :], 2)
    if NORM:
        mixed *= tl.rsqrt(whole_sum(square) / (blocks * K) + eps)
    return mixed


@triton.jit
def mixed_places(
    index, rank, ranks, row_step, block_step, K, blocks,
    L: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Of quads number `index` of a tile of ranks by L blocks by BQ quads, ranks from `rank` on: where
    their rows begin, their place in the row, and the quads from there to its end."""
    here = rank + index // (L * BQ)
    block = index // BQ % L
    at = here.to(tl.int64) * row_step + block.to(tl.int64) * block_step
    quad = index % BQ
    there = (here < ranks) & (block < blocks)
    return at, quad, tl.where(there, tl.cdiv(K, 128) * BITS - quad, 0)


@triton.jit
def mixed_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    L: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, NORM: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of a segment (see `triton.stage_products`), for all tokens one by one."""
    (
        x, _x_block, w, w_block, w_row, scale, scale_block, scale_row, s, s_out, s_in, s_rank, _bias, y,
        ranks, K, blocks, _part,
    ) = seg  # fmt: skip
    LANES: tl.constexpr = L * BQ
    index = tl.arange(0, BR * LANES * 4)
    at, quad, left = mixed_places(index // 4, tile * BR, ranks, w_row, w_block, K, blocks, L, BQ, BITS)
    words = w + (at + quad * 4 + index % 4), left
    at, quad, left = mixed_places(
        tl.arange(0, BR * LANES), tile * BR, ranks, scale_row, scale_block, K, blocks, L, BQ, BITS
    )
    scales = scale + (at + quad // BITS), left
    first = load_chunk(words, scales, 0, LANES, BITS)
    rank = tile * BR + tl.arange(0, BR)
    rank_ok = rank < ranks
    block = tl.arange(0, L)
    ok = rank_ok[:, None] & (block < blocks)[None, :]
    at_s = rank[:, None, None] * s_rank + block[None, :, None] * s_out + block[None, None, :] * s_in
    s_ok = ok[:, :, None] & (block < blocks)[None, None, :]
    s_tile = tl.load(s + at_s, mask=s_ok, other=0.0).to(tl.float32)
    if WAIT:
        gdc_wait()
    for token in range(tokens):
        mixed = mixed_rows(
            first, words, scales, x + token * x_token, gain, eps, s_tile, K, blocks, L, BQ, BITS, NORM
        )  # fmt: skip
        to = y + token * y_token + block[None, :] * ranks + rank[:, None]
        tl.store(to, mixed.to(y.dtype.element_ty), mask=ok)


def gemv_mix_quantized(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bits: int,
    K: int,
    s: Tensor,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    pdl: bool = False,
    **config: Any,
) -> Tensor:
    """`reference.gemv_mix_quantized` as one kernel, for 1 to 16 tokens.

    Args:
        x: [n, b·K]. packed, scale: of weights [b, r, K], as `launch.gemv_quantized`. s: [b, b, r].
        out: [n, b·r]. pdl, config (BR, BQ, num_warps): as there.
    """
    from blr.kernels.quantized.grouped import grouped
    from blr.kernels.quantized.segments import QuantizedSegment

    x = x if x.stride(1) == 1 else x.contiguous()
    if out is None:
        shape = (x.shape[0], packed.shape[0] * packed.shape[1])
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    segment = QuantizedSegment(x, packed, scale, bits, K, out, mix=s)
    grouped([segment], gain=gain, eps=eps, pdl=pdl, config=[config])
    return out
