"""Segmented matrix-vector products with weights in 8, 4, 3 or 2 bits, dequantized in registers.

One program owns `BR` rows of one block and walks them in chunks of `BQ` quads of 16 bytes, each loaded
by one thread. The lanes of a tile are T rows by BQ quads: where they are as many as the threads, a
thread has quads of one place in BR / T rows, and what it makes of their inputs serves all of them. The
first chunk and its scales are loaded before the program waits for the kernel that makes its input.
Derivation: README.md.
"""

import triton
import triton.language as tl

from blr.kernels.decode.gemv.triton import (
    bias_of,
    outputs,
    row_scale,
    tile_start,
)
from blr.kernels.decode.quantized.bytes import byte_sums
from blr.kernels.decode.quantized.correction import correction, narrow_rows
from blr.kernels.decode.quantized.words import (
    lane_columns,
    load_chunk,
    quad_sums,
    row_quads,
    tile_places,
)


@triton.jit
def chunk_products(chunk, inputs, start, EXACT: tl.constexpr, T: tl.constexpr):
    """[RT, lanes, 1] products of a chunk and [1, lanes, 4] squares of its inputs."""
    tile, factor = chunk
    x, gain, past = inputs
    column = start * T.COLUMNS
    if T.BYTES > 0:
        return byte_sums(tile, factor, x, gain, past, column, T)
    else:
        return quad_sums(tile, factor, x, gain, past, column, EXACT, T)


@triton.jit
def rows_by_fma(chunk, words, scales, inputs, end, T: tl.constexpr):
    """Products of rows with a token on the CUDA cores, and squares of its inputs before the gain, in
    float32 and still to be summed: [RT, lanes, 1], [1, lanes, 4].

    chunk: what `load_chunk` gave of words and scales; T.ONE: there is no other. inputs: pointers
    [lanes·4] to those for field 0 and to their gain (used if T.NORM), and how far each is past the end
    of the row (valid if negative). end: quads of the row.
    """
    EXACT: tl.constexpr = T.CURVED or (T.BITS < 8 and scales[0].dtype.element_ty == tl.float32)
    if T.ONE:
        sums, square = chunk_products(chunk, inputs, 0, EXACT, T)
    else:
        tile, factor = chunk
        lanes: tl.constexpr = factor.shape[1]
        sums = tl.zeros([factor.shape[0], lanes, 1], tl.float32)
        square = tl.zeros([1, lanes, 4], tl.float32)
        for start in range(0, end, T.BQ):
            following, next_factor = load_chunk(words, scales, start + T.BQ, T, lanes)
            found, squares = chunk_products((tile, factor), inputs, start, EXACT, T)
            sums += found
            square += squares
            tile = following
            factor = next_factor
    return sums, square


@triton.jit
def row_sums(sums, BQ: tl.constexpr):
    """[BR] of [RT, T·BQ, 1]."""
    RT: tl.constexpr = sums.shape[0]
    T: tl.constexpr = sums.shape[1] // BQ
    return tl.reshape(tl.sum(tl.reshape(sums, (RT, T, BQ)), 2), (RT * T,))


@triton.jit
def whole_sum(square):
    """The sum of a tile [1, lanes, 4]."""
    return tl.sum(tl.sum(tl.sum(square, 2), 1), 0)


@triton.jit
def stage_start(tile, s, T: tl.constexpr):
    """What does not depend on the inputs of tile number `tile` of a stage (see `stage_products`):
    (first chunk, words, scales, block, outputs [BR], valid, what corrects them)."""
    block, start = tile_start(tile, s, T.BR)
    # Pointers to the first row of the tile; within a tile, offsets of 32 bits do.
    w_row = s.w_row * T.UNIT
    w = s.w + (block.to(tl.int64) * s.w_block + start.to(tl.int64) * w_row)
    scale = s.scale + (block.to(tl.int64) * s.scale_block + start.to(tl.int64) * s.scale_row)
    rows = s.rows - start
    words, scales = tile_places(w, w_row, scale, s.scale_row, rows, s.K, T)
    chunk = load_chunk(words, scales, 0, T, T.T * T.BQ)
    row = tl.arange(0, T.BR)
    out = outputs(s, block, start + row)
    return chunk, words, scales, block, out, row < rows, narrow_rows(s, out, row < rows, T)


@triton.jit
def stage_products(started, s, gain, T: tl.constexpr):
    """Products of the tile that `stage_start` started, for `stage_rows`.

    s, T: `segments.QuantizedStage` and `segments.QuantizedTile`.
    """
    chunk, words, scales, block = started[0], started[1], started[2], started[3]
    x = s.x + block * s.x_block
    if T.NORM == 2:
        gain += block * s.x_block
    at = lane_columns(T.T * T.BQ, T)
    return rows_by_fma(chunk, words, scales, (x + at, gain + at, at - s.K), row_quads(s.K, T), T)


@triton.jit
def stage_rows(products, started, s, eps, T: tl.constexpr):
    """What `stage_products` gave as (sums, outputs, valid), with what corrects it."""
    out, ok, narrow = started[4], started[5], started[6]
    sums, square = products
    constant = bias_of(s, out, ok, T.BIAS)
    found = row_sums(sums, T.BQ)
    if T.NORM == 1:
        copies: tl.constexpr = square.shape[1] // T.BQ
        found *= tl.rsqrt(whole_sum(square) / (copies * s.K) + eps)
    if T.NORM == 2:
        found *= row_scale(s.x, s.blocks * s.K, eps)
    return found + correction(s, narrow, T) + constant, out, ok
