"""First stage of BLAST with its mix, weights quantized: as in kernels/decode/gemv/grouped.py.

    y[n, k, r] = Σ_l s[k, l, r] (w[l, r, :] · norm(x)[n, l, :])

A program owns a few ranks of all blocks. The tile of packed weights is that of `triton.py` with the
quads of all blocks in one axis. S is in full precision.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from blr.kernels.decode.quantized.triton import rows_by_fma, whole_sum
from blr.kernels.decode.quantized.words import (
    lane_columns,
    load_chunk,
    row_quads,
    row_words,
    scale_at,
    words_left,
)


@triton.jit
def mixed_rows(chunk, words, scales, x, gain, eps, s_tile, K, blocks, L: tl.constexpr, T: tl.constexpr):
    """One token: [BR, L] in float32, ranks by output blocks.

    chunk, words, scales: as `load_chunk` has them. s_tile: [rank, k, l] in float32.
    """
    LANES: tl.constexpr = L * T.BQ
    block = tl.arange(0, LANES * 4) // (4 * T.BQ)
    at = lane_columns(LANES, T)
    x_at = x + (block * K + at)
    inputs = x_at, gain + (block * K + at), tl.where(block < blocks, at - K, at)
    sums, square = rows_by_fma(chunk, words, scales, inputs, row_quads(K, T), T)
    z = tl.sum(tl.reshape(sums, (sums.shape[0], L, T.BQ)), 2)
    mixed = tl.sum(s_tile * z[:, None, :], 2)
    if T.NORM:
        mixed *= tl.rsqrt(whole_sum(square) / (blocks * K) + eps)
    return mixed


@triton.jit
def mixed_places(index, rank, ranks, row_step, block_step, blocks, L: tl.constexpr, T: tl.constexpr):
    """Of quads number `index` of a tile of ranks by L blocks by BQ quads, ranks from `rank` on: where
    their rows begin, their place in the row, and whether there is such a row."""
    here = rank + index // (L * T.BQ)
    block = index // T.BQ % L
    at = here.to(tl.int64) * row_step + block.to(tl.int64) * block_step
    return at, index % T.BQ, (here < ranks) & (block < blocks)


@triton.jit
def mixed_segment(
    tile, s, gain, eps, L: tl.constexpr, T: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """Tile number `tile` of a stage of up to L blocks."""
    BR: tl.constexpr = T.BR
    LANES: tl.constexpr = L * T.BQ
    PARTS: tl.constexpr = 1 if T.WORDS >= 4 else 2
    K, ranks, blocks = s.K, s.rows, s.blocks
    index = tl.arange(0, BR * LANES * 4)
    w_row = s.w_row * T.UNIT
    at, quad, there = mixed_places(index // 4, tile * BR, ranks, w_row, s.w_block, blocks, L, T)
    left = tl.where(there, words_left(quad, index % 4, K, T), 0)
    words = row_words(s.w + at, quad, index % 4, left, T)
    index = tl.arange(0, BR * LANES * PARTS)
    at, quad, there = mixed_places(
        index // PARTS, tile * BR, ranks, s.scale_row, s.scale_block, blocks, L, T
    )
    group = scale_at(quad, index % PARTS, T)
    scales = s.scale + (at + group), tl.where(there, tl.cdiv(K, T.GROUP) - group, 0)
    first = load_chunk(words, scales, 0, T, LANES)
    rank = tile * BR + tl.arange(0, BR)
    rank_ok = rank < ranks
    block = tl.arange(0, L)
    ok = rank_ok[:, None] & (block < blocks)[None, :]
    at_mix = rank[:, None, None] * s.mix_rank + block[None, :, None] * s.mix_out
    at_mix += block[None, None, :] * s.mix_in
    mix_ok = ok[:, :, None] & (block < blocks)[None, None, :]
    mix = tl.load(s.mix + at_mix, mask=mix_ok, other=0.0).to(tl.float32)
    if WAIT:
        gdc_wait()
    mixed = mixed_rows(first, words, scales, s.x, gain, eps, mix, K, blocks, L, T)
    to = s.y + block[None, :] * ranks + rank[:, None]
    tl.store(to, mixed.to(s.y.dtype.element_ty), mask=ok)
