"""Segmented matrix-vector products with weights in 8, 4, 3 or 2 bits, dequantized in registers.

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

from blr.kernels.decode.gemv.triton import activate, bias_of, outputs, store_rows, tile_start
from blr.kernels.decode.quantized.bytes import byte_sums
from blr.kernels.decode.quantized.correction import correction, corrections, narrow_rows
from blr.kernels.decode.quantized.words import (
    column_at,
    field_level,
    lane_columns,
    load_chunk,
    quad_sums,
    row_quads,
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
def chunk_products(chunk, inputs, start, EXACT: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """[RT, lanes, 1] products of a chunk and [1, lanes, 4] squares of its inputs, of two tokens each."""
    tile, factor = chunk
    x, x2, gain, past = inputs
    column = start * T.COLUMNS
    if T.BYTES > 0:
        first, square = byte_sums(tile, factor, x, gain, past, column, T)
    else:
        first, square = quad_sums(tile, factor, x, gain, past, column, EXACT, T)
    second = first
    square2 = square
    if N == 2:
        if T.BYTES > 0:
            second, square2 = byte_sums(tile, factor, x2, gain, past, column, T)
        else:
            second, square2 = quad_sums(tile, factor, x2, gain, past, column, EXACT, T)
    return first, second, square, square2


@triton.jit
def rows_by_fma(chunk, words, scales, inputs, end, N: tl.constexpr, T: tl.constexpr):
    """Products of rows with one or two tokens on the CUDA cores, and squares of their inputs before
    the gain, in float32 and still to be summed: [RT, lanes, 1] twice, [1, lanes, 4] twice.

    chunk: what `load_chunk` gave of words and scales; T.ONE: there is no other. inputs: pointers
    [lanes·4] to those of the first and the second token and to the gain (used if T.NORM) for field 0,
    and how far each is past the end of the row (valid if negative). end: quads of the longest row.
    """
    EXACT: tl.constexpr = T.BITS == 3 or (T.BITS < 8 and scales[0].dtype.element_ty == tl.float32)
    if T.ONE:
        sums, sums2, square, square2 = chunk_products(chunk, inputs, 0, EXACT, N, T)
    else:
        tile, factor = chunk
        lanes: tl.constexpr = factor.shape[1]
        sums = tl.zeros([factor.shape[0], lanes, 1], tl.float32)
        sums2 = sums
        square = tl.zeros([1, lanes, 4], tl.float32)
        square2 = square
        for start in range(0, end, T.BQ):
            following, next_factor = load_chunk(words, scales, start + T.BQ, T, lanes)
            first, second, squares, squares2 = chunk_products((tile, factor), inputs, start, EXACT, N, T)
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
def rows_by_dot(chunk, words, scales, x, x_token, tokens, gain, K, NP: tl.constexpr, T: tl.constexpr):
    """Products of rows with up to NP tokens on the tensor cores, [BR, NP] in float32, and sums of
    squares of their inputs before the gain [NP].

    One product a field, over the words of a chunk. Weights are rounded to the dtype of their scales,
    as `reference.dequantize` rounds them.
    """
    tile, factor = chunk
    BR: tl.constexpr = factor.shape[0]
    FIELDS: tl.constexpr = T.FIELDS
    word = tl.arange(0, 4 * T.BQ)
    cols = column_at(word // 4, word % 4, T)
    token = tl.arange(0, NP)
    there = token < tokens
    operand = scales[0].dtype.element_ty
    sums = tl.zeros([BR, NP], tl.float32)
    square = tl.zeros([NP], tl.float32)
    for start in range(0, row_quads(K, T), T.BQ):
        following, next_factor = load_chunk(words, scales, start + T.BQ, T, T.BQ)
        wide = each_word(factor)
        for field in tl.static_range(FIELDS):
            at = start * T.COLUMNS + field * T.WORDS + cols
            v, squares = token_chunk(x, x_token, token, there, gain, at, K, T.NORM)
            weights = tl.reshape(field_level(tile, field, T.BITS) * wide, (BR, 4 * T.BQ)).to(operand)
            sums = tl.dot(weights, tl.trans(v.to(operand)), sums, input_precision="ieee")
            square += squares
        tile = following
        factor = next_factor
    return sums, square


@triton.jit
def each_word(factor):
    """Scales [RT, lanes, 1 or 2] of quads or their halves for each word of them."""
    if factor.shape[2] == 1:
        return factor
    else:
        RT: tl.constexpr = factor.shape[0]
        lanes: tl.constexpr = factor.shape[1]
        wide = tl.broadcast_to(tl.reshape(factor, (RT, lanes, 2, 1)), (RT, lanes, 2, 2))
        return tl.reshape(wide, (RT, lanes, 4))


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
def stage_products(started, s, gain, tokens, N: tl.constexpr, T: tl.constexpr):
    """Products of the tile that `stage_start` started, for `stage_rows`.

    s, T: `segments.QuantizedStage` and `segments.QuantizedTile`.
    """
    chunk, words, scales, block = started[0], started[1], started[2], started[3]
    x = s.x + block * s.x_block
    if T.NORM == 2:
        gain += block * s.x_block
    if N <= 2:
        at = lane_columns(T.T * T.BQ, T)
        inputs = x + at, x + (s.x_token + at), gain + at, at - s.K
        return rows_by_fma(chunk, words, scales, inputs, row_quads(s.K, T), N, T)
    else:
        return rows_by_dot(chunk, words, scales, x, s.x_token, tokens, gain, s.K, N, T)


@triton.jit
def stage_rows(products, started, s, eps, tokens, N: tl.constexpr, T: tl.constexpr):
    """What `stage_products` gave as (first, second, outputs, valid), as `gemv.triton.stage_rows`, with
    what corrects it."""
    out, ok, narrow = started[4], started[5], started[6]
    constant = bias_of(s, out, ok, T.BIAS)
    if N <= 2:
        first = normed_sums(products[0], products[2], s.K, eps, T.BQ, T.NORM)
        if T.NORM == 2:
            one = tl.arange(0, 1)
            first *= inverse_rms(s.x, s.x_token, one, one < tokens, s.blocks * s.K, eps, 1024)
        first += correction(s, narrow, 0, T)
        second = first
        if N == 2:
            second = normed_sums(products[1], products[3], s.K, eps, T.BQ, T.NORM)
            if T.NORM == 2:
                two = tl.arange(0, 1) + 1
                second *= inverse_rms(s.x, s.x_token, two, two < tokens, s.blocks * s.K, eps, 1024)
            second += correction(s, narrow, 1, T)
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
        if T.RANKS > 0:
            sums += corrections(s, narrow, tokens, N, T)
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
