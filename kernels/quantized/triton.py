"""Segmented matrix-vector products with int8 or int4 weights, dequantized in registers.

One program owns `BR` rows of one block and walks them in chunks of `BQ` quads of 16 bytes, each loaded
by one thread. The lanes of a tile are T rows by BQ quads: where they are as many as the threads, a
thread has quads of one place in BR / T rows, and what it makes of their inputs serves all of them. The
first chunk and its scales are loaded before the program waits for the kernel that makes its input.
Derivation: README.md.
"""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.gemv.triton import activate, bias_of, outputs, store_rows, tile_start
from blr.kernels.quantized.words import (
    chunk_inputs,
    field_columns,
    field_level,
    load_chunk,
    quad_sums,
    tile_places,
)


@triton.jit
def inverse_rms(x, x_token, token, there, width, eps, BK: tl.constexpr):
    """One over the root mean square of `width` inputs of tokens [NP]: of blocks that the rows of a
    program see one of."""
    lane = tl.arange(0, BK)[None, :]
    square = tl.zeros([token.shape[0], BK], tl.float32)
    for start in range(0, width, BK):
        ok = there[:, None] & (start + lane < width)
        v = tl.load(x + token[:, None] * x_token + start + lane, mask=ok, other=0.0).to(tl.float32)
        square += v * v
    return tl.rsqrt(tl.sum(square, 1) / width + eps)


@triton.jit
def chunk_products(
    chunk, inputs, start, EXACT: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr
):
    """[RT, lanes, 1] products of a chunk and [1, lanes, 4] squares of its inputs, of two tokens each."""
    tile, factor = chunk
    x, x2, gain, past = inputs
    column = start // BITS * 128
    v, square = chunk_inputs(x, gain, past, column, BITS, NORM)
    first = quad_sums(tile, v, BITS, EXACT) * factor
    second = first
    square2 = square
    if N == 2:
        v, square2 = chunk_inputs(x2, gain, past, column, BITS, NORM)
        second = quad_sums(tile, v, BITS, EXACT) * factor
    return first, second, square, square2


@triton.jit
def rows_by_fma(
    chunk, words, scales, inputs, end,
    N: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Products of rows with one or two tokens on the CUDA cores, and squares of their inputs before
    the gain, in float32 and still to be summed: [RT, lanes, 1] twice, [1, lanes, 4] twice.

    chunk: what `load_chunk` gave of words and scales; ONE: there is no other. inputs: pointers
    [lanes·4] to those of the first and the second token and to the gain (used if NORM) for field 0, and
    how far each is past the end of the row (valid if negative). end: quads of the longest row.
    """
    EXACT: tl.constexpr = BITS == 4 and scales[0].dtype.element_ty == tl.float32
    if ONE:
        sums, sums2, square, square2 = chunk_products(chunk, inputs, 0, EXACT, N, BITS, NORM)
    else:
        tile, factor = chunk
        lanes: tl.constexpr = tile.shape[1]
        sums = tl.zeros([tile.shape[0], lanes, 1], tl.float32)
        sums2 = sums
        square = tl.zeros([1, lanes, 4], tl.float32)
        square2 = square
        for start in range(0, end, BQ):
            following, next_factor = load_chunk(words, scales, start + BQ, lanes, BITS)
            first, second, squares, squares2 = chunk_products(
                (tile, factor), inputs, start, EXACT, N, BITS, NORM
            )
            sums += first
            square += squares
            if N == 2:
                sums2 += second
                square2 += squares2
            tile = following
            factor = next_factor
    return sums, sums2, square, square2


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
def normed_sums(sums, square, K, eps, BQ: tl.constexpr, NORM: tl.constexpr):
    """`row_sums`, times one over the root mean square of the inputs if NORM is 1."""
    found = row_sums(sums, BQ)
    if NORM == 1:
        copies: tl.constexpr = square.shape[1] // BQ
        found *= tl.rsqrt(whole_sum(square) / (copies * K) + eps)
    return found


@triton.jit
def token_chunk(x, x_token, token, there, gain, cols, K, NORM: tl.constexpr):
    """[NP, BK] inputs of all tokens at `cols` in float32, and the sums of their squares [NP]."""
    ok = there[:, None] & (cols < K)[None, :]
    v = tl.load(x + token[:, None] * x_token + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    square = tl.sum(v * v, 1)
    if NORM:
        v *= tl.load(gain + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]
    return v, square


@triton.jit
def rows_by_dot(
    chunk, words, scales, x, x_token, tokens, gain, K,
    NP: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Products of rows with up to NP tokens on the tensor cores, [BR, NP] in float32, and sums of
    squares of their inputs before the gain [NP].

    One product a field, over the words of a chunk. Weights are rounded to the dtype of their scales,
    as `reference.dequantize` rounds them.
    """
    WIDTH: tl.constexpr = 4 * BITS  # words of a group
    BR: tl.constexpr = chunk[0].shape[0]
    word = tl.arange(0, 4 * BQ)
    cols = word // WIDTH * 128 + word % WIDTH
    token = tl.arange(0, NP)
    there = token < tokens
    operand = scales[0].dtype.element_ty
    tile, factor = chunk
    sums = tl.zeros([BR, NP], tl.float32)
    square = tl.zeros([NP], tl.float32)
    for start in range(0, tl.cdiv(K, 128) * BITS, BQ):
        following, next_factor = load_chunk(words, scales, start + BQ, BQ, BITS)
        for field in tl.static_range(32 // BITS):
            at = start // BITS * 128 + field * WIDTH + cols
            v, squares = token_chunk(x, x_token, token, there, gain, at, K, NORM)
            weights = tl.reshape(field_level(tile, field, BITS) * factor, (BR, 4 * BQ)).to(operand)
            sums = tl.dot(weights, tl.trans(v.to(operand)), sums, input_precision="ieee")
            square += squares
        tile = following
        factor = next_factor
    return sums, square


@triton.jit
def stage_start(tile, s, T: tl.constexpr):
    """What does not depend on the inputs of tile number `tile` of a stage (see `stage_products`):
    (first chunk, words, scales, block, rows [BR], valid)."""
    block, start = tile_start(tile, s, T.BR)
    # Pointers to the first row of the tile; within a tile, offsets of 32 bits do.
    w = s.w + (block.to(tl.int64) * s.w_block + start.to(tl.int64) * s.w_row)
    scale = s.scale + (block.to(tl.int64) * s.scale_block + start.to(tl.int64) * s.scale_row)
    rows = s.rows - start
    words, scales = tile_places(
        w, s.w_row, scale, s.scale_row, rows, s.K, T.BR // T.T, T.T, T.BQ, T.BITS
    )  # fmt: skip
    chunk = load_chunk(words, scales, 0, T.T * T.BQ, T.BITS)
    row = tl.arange(0, T.BR)
    return chunk, words, scales, block, start + row, row < rows


@triton.jit
def stage_products(started, s, gain, tokens, N: tl.constexpr, T: tl.constexpr):
    """Products of the tile that `stage_start` started, for `stage_rows`.

    s, T: `segments.QuantizedStage` and `segments.QuantizedTile`.
    """
    chunk, words, scales, block, _rows, _ok = started
    x = s.x + block * s.x_block
    if T.NORM == 2:
        gain += block * s.x_block
    if N <= 2:
        lanes: tl.constexpr = chunk[0].shape[1]
        at = field_columns(lanes, T.BQ, T.BITS)
        inputs = x + at, x + (s.x_token + at), gain + at, at - s.K
        end = tl.cdiv(s.K, 128) * T.BITS
        return rows_by_fma(chunk, words, scales, inputs, end, N, T.BQ, T.BITS, T.NORM, T.ONE)
    else:
        return rows_by_dot(
            chunk, words, scales, x, s.x_token, tokens, gain, s.K, N, T.BQ, T.BITS, T.NORM
        )  # fmt: skip


@triton.jit
def stage_rows(products, started, s, eps, tokens, N: tl.constexpr, T: tl.constexpr):
    """What `stage_products` gave as (first, second, outputs, valid), as `gemv.triton.stage_rows`."""
    block, rows, ok = started[3], started[4], started[5]
    out = outputs(s, block, rows)
    constant = bias_of(s, out, ok, T.BIAS)
    if N <= 2:
        first = normed_sums(products[0], products[2], s.K, eps, T.BQ, T.NORM)
        if T.NORM == 2:
            one = tl.arange(0, 1)
            first *= inverse_rms(s.x, s.x_token, one, one < tokens, s.blocks * s.K, eps, 1024)
        second = first
        if N == 2:
            second = normed_sums(products[1], products[3], s.K, eps, T.BQ, T.NORM)
            if T.NORM == 2:
                two = tl.arange(0, 1) + 1
                second *= inverse_rms(s.x, s.x_token, two, two < tokens, s.blocks * s.K, eps, 1024)
        return first + constant, second + constant, out, ok
    else:
        sums, square = products
        if T.NORM == 1:
            sums *= tl.rsqrt(square / s.K + eps)[None, :]
        if T.NORM == 2:
            token = tl.arange(0, N)
            norm = inverse_rms(s.x, s.x_token, token, token < tokens, s.blocks * s.K, eps, 128)
            sums *= norm[None, :]
        sums += constant[:, None]
        return sums, sums, out, ok


@triton.jit
def gemv_kernel(
    s, residual, residual_token, gain, eps, tokens,
    N: tl.constexpr, T: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``y = act(W x + bias) + residual`` for one stage with quantized weights; see `launch`."""
    if PDL:
        gdc_launch_dependents()
    started = stage_start(tl.program_id(0), s, T)
    if PDL:
        gdc_wait()
    products = stage_products(started, s, gain, tokens, N, T)
    first, second, out, ok = stage_rows(products, started, s, eps, tokens, N, T)
    first, second = activate(first, ACT), activate(second, ACT)
    store_rows(s, residual, residual_token, first, second, out, ok, tokens, N, RESIDUAL)
