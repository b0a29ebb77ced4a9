"""Two segments with the same rows in one tile: gate and up, each in one half of the lanes."""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.decode.gemv.triton import bias_of, outputs, tile_start
from blr.kernels.decode.quantized.correction import correction, narrow_rows
from blr.kernels.decode.quantized.triton import inverse_rms, rows_by_fma, whole_sum
from blr.kernels.decode.quantized.words import (
    lane_columns,
    load_chunk,
    row_quads,
    row_words,
    scale_at,
    words_left,
)


@triton.jit
def pair_places(s, apart, block, start, T: tl.constexpr):
    """What `load_chunk` takes, for the rows from `start` on of a block of two stages side by side."""
    RT: tl.constexpr = T.BR // T.T
    PARTS: tl.constexpr = 1 if T.WORDS >= 4 else 2
    wide, below = block.to(tl.int64), start.to(tl.int64)
    w_row, row_apart = s.w_row * T.UNIT, apart.w_row * T.UNIT
    w = s.w + (wide * s.w_block + below * w_row)
    w_apart = apart.w + wide * apart.w_block + below * row_apart
    index = tl.arange(0, RT * 2 * T.T * T.BQ * 4)
    half, row, quad = pair_quads(index // 4, T)
    left = words_left(quad, index % 4, s.K + half * apart.K, T)
    at = w + (row * w_row + half * (w_apart + row * row_apart))
    words = row_words(at, quad, index % 4, tl.where(row < s.rows - start, left, 0), T)
    scale = s.scale + (wide * s.scale_block + below * s.scale_row)
    scale_apart = apart.scale + wide * apart.scale_block + below * apart.scale_row
    index = tl.arange(0, RT * 2 * T.T * T.BQ * PARTS)
    half, row, quad = pair_quads(index // PARTS, T)
    group = scale_at(quad, index % PARTS, T)
    left = tl.cdiv(s.K + half * apart.K, T.GROUP) - group
    at = row * s.scale_row + half * (scale_apart + row * apart.scale_row) + group
    return words, (scale + at, tl.where(row < s.rows - start, left, 0))


@triton.jit
def pair_quads(index, T: tl.constexpr):
    """Of quads number `index`: which stage they are of, their row and their place in it."""
    half = index // (T.T * T.BQ) % 2
    row = index // (2 * T.T * T.BQ) * T.T + index // T.BQ % T.T
    return half, row, index % T.BQ


@triton.jit
def pair_rows(
    tile, s, apart, up, gain, eps, tokens,
    N: tl.constexpr, T: tl.constexpr, UP: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Products of tile number `tile` of two stages with one or two tokens: (of the first stage, of
    the second, the same of the second token, outputs, valid), each [BR].

    One half of the lanes is for each stage, so that the same instructions serve both. apart: from `s`
    to the second stage `up`, field by field: elements between pointers, differences of numbers. (What
    a compiler knows of the alignment of pointers it may lose in a choice of two.) UP: tile of `up`.
    """
    block, start = tile_start(tile, s, T.BR)
    words, scales = pair_places(s, apart, block, start, T)
    chunk = load_chunk(words, scales, 0, T, 2 * T.T * T.BQ)
    rows = start + tl.arange(0, T.BR)
    ok = rows < s.rows
    out = outputs(s, block, rows)
    narrow, narrow_up = narrow_rows(s, out, ok, T), narrow_rows(up, out, ok, UP)
    constant, constant_up = bias_of(s, out, ok, T.BIAS), bias_of(up, out, ok, UP.BIAS)
    at = lane_columns(2 * T.T * T.BQ, T)
    half = tl.arange(0, 8 * T.T * T.BQ) // (4 * T.T * T.BQ)
    x = s.x + (block * s.x_block + at + half * (apart.x + block * apart.x_block))
    past = at - (s.K + half * apart.K)
    if T.NORM == 2:
        gain += block * s.x_block
    inputs = x, x + (s.x_token + half * apart.x_token), gain + at, past
    if WAIT:
        gdc_wait()
    end = row_quads(tl.maximum(s.K, s.K + apart.K), T)
    sums, sums2, square, square2 = rows_by_fma(chunk, words, scales, inputs, end, N, T)
    gate, up_sum = pair_sums(sums, T.BQ, T.T)
    gate2, up_sum2 = gate, up_sum
    if N == 2:
        gate2, up_sum2 = pair_sums(sums2, T.BQ, T.T)
    if T.NORM > 0:
        one = tl.arange(0, 1)
        if T.NORM == 1:
            norm = tl.rsqrt(whole_sum(square) / (2 * T.T * s.K) + eps)
            norm2 = tl.rsqrt(whole_sum(square2) / (2 * T.T * s.K) + eps)
        else:
            width = s.blocks * s.K
            norm = inverse_rms(s.x, s.x_token, one, one < tokens, width, eps, 1024)
            norm2 = inverse_rms(s.x, s.x_token, one + N - 1, one < tokens, width, eps, 1024)
        gate, up_sum, gate2, up_sum2 = gate * norm, up_sum * norm, gate2 * norm2, up_sum2 * norm2
    gate, gate2 = gate + constant, gate2 + constant
    up_sum, up_sum2 = up_sum + constant_up, up_sum2 + constant_up
    gate, up_sum = gate + correction(s, narrow, 0, T), up_sum + correction(up, narrow_up, 0, UP)
    if N == 2:
        gate2 += correction(s, narrow, 1, T)
        up_sum2 += correction(up, narrow_up, 1, UP)
    return gate, up_sum, gate2, up_sum2, out, ok


@triton.jit
def pair_sums(sums, BQ: tl.constexpr, T: tl.constexpr):
    """Two [BR] of [RT, 2·T·BQ, 1]."""
    RT: tl.constexpr = sums.shape[0]
    both = tl.permute(tl.sum(tl.reshape(sums, (RT, 2, T, BQ)), 3), (0, 2, 1))
    return tl.split(tl.reshape(both, (RT * T, 2)))
