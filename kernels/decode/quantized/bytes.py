"""Rows of 8, 4 and 2 bits times one or two tokens in integers: four products an instruction (`dp4a`).

Inputs become integers of 16 bits with a scale a quad's columns, half a step of which is 2^-16 of the
largest among them: far below the rounding of half precision, of which models are that take this way.
High and low bytes of four inputs each are packed in words; levels lie in bytes as they are stored, a
mask apart. Derivation: README.md.
"""

import triton
import triton.language as tl

from blr.kernels.decode.quantized.words import field_inputs

TOP = tl.constexpr(32512.0)  # the largest integer, whose high byte is 127
MAGIC = tl.constexpr(12582912.0)  # 1.5·2^23: a float of that size ends with the bits of an integer


@triton.jit
def four_products(words, x, sums, SIGNED: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """`sums` plus the products of four bytes of words with those of x, signed if SIGNED and if HIGH."""
    if ASM:
        if SIGNED:
            if HIGH:
                return tl.inline_asm_elementwise(
                    "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, sums], tl.int32, True, 1
                )
            else:
                return tl.inline_asm_elementwise(
                    "dp4a.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, sums], tl.int32, True, 1
                )
        else:
            if HIGH:
                return tl.inline_asm_elementwise(
                    "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, sums], tl.int32, True, 1
                )
            else:
                return tl.inline_asm_elementwise(
                    "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [words, x, sums], tl.int32, True, 1
                )
    else:
        for byte in tl.static_range(4):
            sums += byte_of(words, byte, SIGNED) * byte_of(x, byte, HIGH)
        return sums


@triton.jit
def byte_of(words, BYTE: tl.constexpr, SIGNED: tl.constexpr):
    """A byte of int32 words as a number."""
    moved = words << (24 - 8 * BYTE)
    return moved >> 24 if SIGNED else (moved >> 24) & 255


@triton.jit
def packed_bytes(a, b, c, d, ASM: tl.constexpr):
    """The lowest bytes of four int32, and the next ones, in a word each."""
    if ASM:
        first = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], tl.int32, True, 1
        )
        last = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [c, d], tl.int32, True, 1
        )
        low = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, last], tl.int32, True, 1
        )
        high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [first, last], tl.int32, True, 1
        )
        return low, high
    else:
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | ((d >> 8) << 24)
        return low, high


@triton.jit
def lane_scale(x, gain, past, column, T: tl.constexpr):
    """Of the columns of quads: TOP over the largest input [1, lanes, 1], and the squares of inputs
    before the gain and the inputs themselves, both summed over fields [1, lanes, 4]."""
    FIELDS: tl.constexpr = T.FIELDS
    v, square = field_inputs(x, gain, past, column, T)
    largest, total = tl.abs(v), v
    for field in tl.static_range(1, FIELDS):
        v, more = field_inputs(x, gain, past, column + field * T.WORDS, T)
        square += more
        total += v
        largest = tl.maximum(largest, tl.abs(v))
    largest = tl.maximum(tl.max(largest, 2, keep_dims=True), 1e-30)
    return TOP / largest, square, total


@triton.jit
def whole(x, gain, past, column, scale, FIELD: tl.constexpr, T: tl.constexpr):
    """Inputs of field FIELD as integers, in the last 16 bits of words [1, lanes, 4]."""
    v, _square = field_inputs(x, gain, past, column + FIELD * T.WORDS, T)
    return (v * scale + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def byte_sums(tile, factor, x, gain, past, column, T: tl.constexpr):
    """As `words.quad_sums`, to the precision of integers of 16 bits."""
    scale, square, total = lane_scale(x, gain, past, column, T)
    words = tile[0]
    PLACES: tl.constexpr = 8 // T.BITS  # levels in a byte
    SIGNED: tl.constexpr = T.BITS == 8
    high = tl.zeros(words.shape, tl.int32)
    low = high
    for place in tl.static_range(PLACES):
        a = whole(x, gain, past, column, scale, place, T)
        b = whole(x, gain, past, column, scale, place + PLACES, T)
        c = whole(x, gain, past, column, scale, place + 2 * PLACES, T)
        d = whole(x, gain, past, column, scale, place + 3 * PLACES, T)
        x_low, x_high = packed_bytes(a, b, c, d, T.BYTES == 1)
        x_low = tl.broadcast_to(x_low, words.shape)
        x_high = tl.broadcast_to(x_high, words.shape)
        levels = words
        if T.BITS == 4:
            levels = (words >> (4 * place)) & 0x0F0F0F0F
        elif T.BITS == 2:
            levels = (words >> (2 * place)) & 0x03030303
        high = four_products(levels, x_high, high, SIGNED, True, T.BYTES == 1)
        low = four_products(levels, x_low, low, SIGNED, False, T.BYTES == 1)
    if T.BITS == 4:
        total *= 8.0
    elif T.BITS == 2:
        total *= 1.5
    else:
        total *= 0.0
    if T.WORDS >= 4:
        sums = tl.sum(high * 256 + low, 2, keep_dims=True).to(tl.float32)
        total = tl.sum(total, 2, keep_dims=True)
    else:
        halves = tl.reshape(high * 256 + low, (words.shape[0], words.shape[1], 2, 2))
        sums = tl.sum(halves, 3).to(tl.float32)
        total = tl.sum(tl.reshape(total, (1, total.shape[1], 2, 2)), 3)
    return tl.sum((sums * (1.0 / scale) - total) * factor, 2, keep_dims=True), square
