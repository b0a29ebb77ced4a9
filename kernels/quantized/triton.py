"""Segmented matrix-vector products with int8 or int4 weights, dequantized in registers.

One program owns `BR` rows of one block and walks them in chunks of `BQ` quads of 16 bytes (16 int8 or
32 int4 weights of one group, one load a thread). The first chunk and its scales are loaded before
the program waits for the kernel that makes its input. Derivation: README.md.
"""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.gemv.triton import activate


@triton.jit
def packed_tile(w, rows, rows_ok, start, end, w_row, BQ: tl.constexpr):
    """[BR, BQ, 4] words of packed weights from quad `start` on; `w` counts in words of 4 bytes."""
    lane = tl.arange(0, BQ)
    columns = lane[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    mask = rows_ok[:, None, None] & (lane < end - start)[None, :, None]
    return tl.load(w + start * 4 + rows[:, None, None] * w_row + columns, mask=mask, other=0)


@triton.jit
def scale_tile(scale, rows, rows_ok, start, end, scale_row, BQ: tl.constexpr, BITS: tl.constexpr):
    """[BR, BQ] scales in float32, zero outside: a group has BITS quads."""
    lane = tl.arange(0, BQ)
    at = scale + start // BITS + rows[:, None] * scale_row + (lane // BITS)[None, :]
    mask = rows_ok[:, None] & (lane < end - start)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def quad_columns(quads, BITS: tl.constexpr):
    """[BQ, 16] columns of the bytes of quads: of the low nibbles if BITS is 4, 64 less than the high."""
    byte = tl.arange(0, 16)[None, :]
    if BITS == 8:
        return quads[:, None] * 16 + byte
    else:
        return (quads // 4)[:, None] * 128 + (quads % 4)[:, None] * 16 + byte


@triton.jit
def level8(half, ODD: tl.constexpr):
    """Signed byte 0 or 1 of words as float32, exactly; byte 1 comes 256 times too large.

    The byte, its sign bit flipped, becomes the mantissa of 2^23: no conversion instruction.
    """
    if ODD:
        return ((half & 0xFF00) ^ 0x4B008000).to(tl.float32, bitcast=True) - 8421376.0  # 2^23 + 2^15
    else:
        return ((half & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0  # 2^23 + 2^7


@triton.jit
def level4(half, AT: tl.constexpr):
    """Nibble AT (0…3) of words, less 8, as float32, exactly and 16^AT times too large."""
    number = (half & (0xF << (4 * AT))) | 0x4B000000
    return number.to(tl.float32, bitcast=True) - (8388608.0 + 8.0 * 16.0**AT)


@triton.jit
def bytes_in_order(b0, b1, b2, b3):
    """[BR, BQ, 16] of the four [BR, BQ, 4] that hold bytes 0…3 of each word."""
    quads = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return tl.reshape(quads, (b0.shape[0], b0.shape[1], 16))


@triton.jit
def levels(tile, BITS: tl.constexpr):
    """Weights of a packed tile without scale, float32.

    BITS 8: [BR, BQ, 16]. BITS 4: [BR, BQ, 32], low and high nibble of a byte side by side. Each is
    too large by the inverse of `level_factors`.
    """
    upper = tile >> 16
    if BITS == 8:
        return bytes_in_order(
            level8(tile, False), level8(tile, True), level8(upper, False), level8(upper, True)
        )
    else:
        low = bytes_in_order(level4(tile, 0), level4(tile, 2), level4(upper, 0), level4(upper, 2))
        high = bytes_in_order(level4(tile, 1), level4(tile, 3), level4(upper, 1), level4(upper, 3))
        return tl.reshape(tl.join(low, high), (tile.shape[0], tile.shape[1], 32))


@triton.jit
def level_factors(cols, HIGH: tl.constexpr):
    """What undoes the powers of two of `levels` for the bytes of `cols`."""
    odd = (cols & 1) != 0
    if HIGH:
        return tl.where(odd, 0.000244140625, 0.0625)  # 16^-3, 16^-1
    else:
        return tl.where(odd, 0.00390625, 1.0)  # 16^-2 or 256^-1


@triton.jit
def input_chunk(x, gain, cols, ok, K, BITS: tl.constexpr, NORM: tl.constexpr):
    """Inputs of one token for quads, in the order of `levels`, divided by its powers of two.

    cols: [BQ, 16] of `quad_columns`; ok: [BQ, 1] of quads that exist. x, gain: [BQ, 1] or one pointer
    to what column 0 of a quad's row is multiplied with. Returns [BQ, 16 or 32] in float32 and, for
    NORM, their squares before the gain summed over the last axis [BQ].
    """
    here = ok & (cols < K)
    v = tl.load(x + cols, mask=here, other=0.0).to(tl.float32)
    square = tl.sum(v * v, 1)
    if NORM:
        v *= tl.load(gain + cols, mask=here, other=0.0).to(tl.float32)
    v *= level_factors(cols, False)
    if BITS == 8:
        return v, square
    else:
        here = ok & (cols + 64 < K)
        high = tl.load(x + cols + 64, mask=here, other=0.0).to(tl.float32)
        square += tl.sum(high * high, 1)
        if NORM:
            high *= tl.load(gain + cols + 64, mask=here, other=0.0).to(tl.float32)
        high *= level_factors(cols, True)
        return tl.reshape(tl.join(v, high), (v.shape[0], 32)), square


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
def rows_by_fma(
    x, x_token, gain, eps, w, w_row, scale, scale_row, rows, rows_ok, K,
    N: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Products of `rows` with one or two tokens on the CUDA cores: two [BR] in float32.

    As `blr.kernels.gemv.triton.rows_by_fma`; w, w_row count words of 4 bytes, columns have stride 1.
    NORM: 1 for an RMS norm of these K inputs, 2 for their gain only (see `inverse_rms`).
    """
    lane = tl.arange(0, BQ)
    end = tl.cdiv(K, 128) * BITS
    tile = packed_tile(w, rows, rows_ok, 0, end, w_row, BQ)
    factor = scale_tile(scale, rows, rows_ok, 0, end, scale_row, BQ, BITS)
    if WAIT:
        gdc_wait()
    sums = tl.zeros([BR, BQ], tl.float32)
    sums2 = tl.zeros([BR, BQ], tl.float32)
    square = tl.zeros([BQ], tl.float32)
    square2 = tl.zeros([BQ], tl.float32)
    for start in range(0, end, BQ):
        cols = quad_columns(start + lane, BITS)
        ok = (start + lane < end)[:, None]
        following = packed_tile(w, rows, rows_ok, start + BQ, end, w_row, BQ)
        next_factor = scale_tile(scale, rows, rows_ok, start + BQ, end, scale_row, BQ, BITS)
        weights = levels(tile, BITS)
        v, squares = input_chunk(x, gain, cols, ok, K, BITS, NORM)
        sums += tl.sum(weights * v[None, :, :], 2) * factor
        square += squares
        if N == 2:
            v, squares = input_chunk(x + x_token, gain, cols, ok, K, BITS, NORM)
            sums2 += tl.sum(weights * v[None, :, :], 2) * factor
            square2 += squares
        tile = following
        factor = next_factor
    first = tl.sum(sums, 1)
    second = first
    if N == 2:
        second = tl.sum(sums2, 1)
    if NORM == 1:
        first *= tl.rsqrt(tl.sum(square, 0) / K + eps)
        if N == 2:
            second *= tl.rsqrt(tl.sum(square2, 0) / K + eps)
    return first, second


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
def scaled_half(b0, b1, b2, b3, factor, EVEN: tl.constexpr, ODD: tl.constexpr):
    """[BR, 16·BQ] weights of four [BR, BQ, 4] levels: bytes 0 and 2 times EVEN, 1 and 3 times ODD."""
    even = (factor * EVEN)[:, :, None]
    odd = (factor * ODD)[:, :, None]
    quads = bytes_in_order(b0 * even, b1 * odd, b2 * even, b3 * odd)
    return tl.reshape(quads, (quads.shape[0], quads.shape[1] * 16))


@triton.jit
def rows_by_dot(
    x, x_token, tokens, gain, eps, w, w_row, scale, scale_row, rows, rows_ok, K,
    NP: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Products of `rows` with up to NP tokens on the tensor cores: [BR, NP] in float32.

    Weights are rounded to the dtype of their scales, as `reference.dequantize` rounds them.
    """
    byte = tl.arange(0, 16 * BQ)
    token = tl.arange(0, NP)
    there = token < tokens
    operand = scale.dtype.element_ty
    end = tl.cdiv(K, 128) * BITS
    tile = packed_tile(w, rows, rows_ok, 0, end, w_row, BQ)
    factor = scale_tile(scale, rows, rows_ok, 0, end, scale_row, BQ, BITS)
    if WAIT:
        gdc_wait()
    sums = tl.zeros([BR, NP], tl.float32)
    square = tl.zeros([NP], tl.float32)
    for start in range(0, end, BQ):
        following = packed_tile(w, rows, rows_ok, start + BQ, end, w_row, BQ)
        next_factor = scale_tile(scale, rows, rows_ok, start + BQ, end, scale_row, BQ, BITS)
        upper = tile >> 16
        if BITS == 8:
            v, squares = token_chunk(x, x_token, token, there, gain, start * 16 + byte, K, NORM)
            weights = scaled_half(
                level8(tile, False), level8(tile, True), level8(upper, False), level8(upper, True),
                factor, 1.0, 0.00390625,
            )  # fmt: skip
        else:
            cols = start * 32 + (byte // 64) * 128 + byte % 64
            v, squares = token_chunk(x, x_token, token, there, gain, cols, K, NORM)
            weights = scaled_half(
                level4(tile, 0), level4(tile, 2), level4(upper, 0), level4(upper, 2),
                factor, 1.0, 0.00390625,
            )  # fmt: skip
        sums = tl.dot(weights.to(operand), tl.trans(v.to(operand)), sums, input_precision="ieee")
        square += squares
        if BITS == 4:
            v, squares = token_chunk(x, x_token, token, there, gain, cols + 64, K, NORM)
            weights = scaled_half(
                level4(tile, 1), level4(tile, 3), level4(upper, 1), level4(upper, 3),
                factor, 0.0625, 0.000244140625,
            )  # fmt: skip
            sums = tl.dot(weights.to(operand), tl.trans(v.to(operand)), sums, input_precision="ieee")
            square += squares
        tile = following
        factor = next_factor
    if NORM == 1:
        sums *= tl.rsqrt(square / K + eps)[None, :]
    return sums


@triton.jit
def gemv_kernel(
    x, x_token, x_block, gain, eps, w, w_block, w_row, scale, scale_block, scale_row,
    bias, residual, residual_token, y, y_token,
    tokens, rows_per_block, K, blocks, part,
    N: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``y = act(W x + bias) + residual`` for one stage with quantized weights; see `launch`."""
    if PDL:
        gdc_launch_dependents()
    tiles = tl.cdiv(rows_per_block, BR)
    block = tl.program_id(0) // tiles
    rows = (tl.program_id(0) % tiles) * BR + tl.arange(0, BR)
    ok = rows < rows_per_block
    wide = rows.to(tl.int64)
    w += block.to(tl.int64) * w_block
    scale += block.to(tl.int64) * scale_block
    x += block * x_block
    out = (rows // part) * (blocks * part) + block * part + rows % part
    constant = tl.zeros([BR], tl.float32)
    if BIAS:
        constant = tl.load(bias + out, mask=ok, other=0.0).to(tl.float32)
    if N <= 2:
        first, second = rows_by_fma(
            x, x_token, gain, eps, w, w_row, scale, scale_row, wide, ok, K,
            N, BR, BQ, BITS, NORM, PDL,
        )  # fmt: skip
        first = activate(first + constant, ACT)
        if RESIDUAL:
            first += tl.load(residual + out, mask=ok, other=0.0).to(tl.float32)
        tl.store(y + out, first.to(y.dtype.element_ty), mask=ok)
        if N == 2:
            second = activate(second + constant, ACT)
            if RESIDUAL:
                second += tl.load(residual + residual_token + out, mask=ok, other=0.0).to(tl.float32)
            tl.store(y + y_token + out, second.to(y.dtype.element_ty), mask=ok)
    else:
        sums = rows_by_dot(
            x, x_token, tokens, gain, eps, w, w_row, scale, scale_row, wide, ok, K,
            N, BR, BQ, BITS, NORM, PDL,
        )  # fmt: skip
        sums = activate(sums + constant[:, None], ACT)
        token = tl.arange(0, N)
        mask = ok[:, None] & (token < tokens)[None, :]
        if RESIDUAL:
            at = residual + token[None, :] * residual_token + out[:, None]
            sums += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + token[None, :] * y_token + out[:, None], sums.to(y.dtype.element_ty), mask=mask)
