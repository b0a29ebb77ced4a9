"""First stage of BLAST with its mix, weights quantized: as in kernels/gemv/grouped.py.

    y[n, k, r] = Σ_l s[k, l, r] (w[l, r, :] · norm(x)[n, l, :])

A program owns a few ranks of all blocks. The tile of packed weights is that of `triton.py` with blocks
and ranks in one axis; the inputs of all blocks are one tile of quads. S is in full precision.
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

from blr.kernels.quantized.triton import (
    input_chunk,
    levels,
    packed_tile,
    quad_columns,
    scale_tile,
)


@triton.jit
def mixed_rows(
    x, gain, eps, tile, factor, w, rows_w, scale, rows_scale, rows_ok, s_tile, K, blocks,
    L: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token: [L, BR] in float32, output blocks by ranks.

    tile, factor: the first chunk of `packed_tile` and `scale_tile` of rows [L·BR], which begin at
    rows_w and rows_scale. s_tile: [k, l, rank] in float32.
    """
    end = tl.cdiv(K, 128) * BITS
    quad = tl.arange(0, L * BQ)
    block = (quad // BQ)[:, None]
    sums = tl.zeros([L, BR, BQ], tl.float32)
    square = tl.zeros([L * BQ], tl.float32)
    for start in range(0, end, BQ):
        quads = start + quad % BQ
        following = packed_tile(w, rows_w, rows_ok, start + BQ, end, 1, BQ)
        next_factor = scale_tile(scale, rows_scale, rows_ok, start + BQ, end, 1, BQ, BITS)
        ok = (block < blocks) & (quads < end)[:, None]
        cols = quad_columns(quads, BITS)
        v, squares = input_chunk(x + block * K, gain + block * K, cols, ok, K, BITS, NORM)
        square += squares
        weights = levels(tile, BITS)
        products = tl.sum(
            tl.reshape(weights, (L, BR, BQ, v.shape[1])) * tl.reshape(v, (L, 1, BQ, v.shape[1])), 3
        )
        sums += products * tl.reshape(factor, (L, BR, BQ))
        tile = following
        factor = next_factor
    mixed = tl.sum(s_tile * tl.sum(sums, 2)[None, :, :], 1)
    if NORM:
        mixed *= tl.rsqrt(tl.sum(square, 0) / (blocks * K) + eps)
    return mixed


@triton.jit
def mixed_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    L: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, NORM: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of a segment (see `grouped.stage_rows`), for all tokens one by one."""
    (
        x, _x_block, w, w_block, w_row, scale, scale_block, scale_row, s, s_out, s_in, s_rank, _bias, y,
        ranks, K, blocks, _part,
    ) = seg  # fmt: skip
    row = tl.arange(0, L * BR)
    rank = tile * BR + row % BR
    row_ok = (row // BR < blocks) & (rank < ranks)
    row_block = (row // BR).to(tl.int64)
    wide = rank.to(tl.int64)
    rows_w = row_block * w_block + wide * w_row
    rows_scale = row_block * scale_block + wide * scale_row
    end = tl.cdiv(K, 128) * BITS
    first = packed_tile(w, rows_w, row_ok, 0, end, 1, BQ)
    factor = scale_tile(scale, rows_scale, row_ok, 0, end, 1, BQ, BITS)
    block = tl.arange(0, L)
    ranks_here = tile * BR + tl.arange(0, BR)
    ok = (block < blocks)[:, None] & (ranks_here < ranks)[None, :]
    at_s = (
        block[:, None, None] * s_out + block[None, :, None] * s_in + ranks_here[None, None, :] * s_rank
    )
    s_ok = (block < blocks)[:, None, None] & ok[None, :, :]
    s_tile = tl.load(s + at_s, mask=s_ok, other=0.0).to(tl.float32)
    if WAIT:
        gdc_wait()
    for token in range(tokens):
        mixed = mixed_rows(
            x + token * x_token, gain, eps, first, factor, w, rows_w, scale, rows_scale, row_ok,
            s_tile, K, blocks, L, BR, BQ, BITS, NORM,
        )  # fmt: skip
        to = y + token * y_token + block[:, None] * ranks + ranks_here[None, :]
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
