"""Rows of 4 bits times one token in integers: four products an instruction (`dp4a`).

Inputs become integers of 16 bits with a scale a quad, far more exact than half precision.
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
        LEFT: tl.constexpr = "s32" if SIGNED else "u32"
        RIGHT: tl.constexpr = "s32" if HIGH else "u32"
        return tl.inline_asm_elementwise(
            f"dp4a.{LEFT}.{RIGHT} $0, $1, $2, $3;", "=r,r,r,r", [words, x, sums], tl.int32, True, 1
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
def chosen_bytes(a, b, CHOICE: tl.constexpr):
    """Four of the eight bytes of two words, by the digits of CHOICE."""
    return tl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {CHOICE};", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def packed_bytes(a, b, c, d, ASM: tl.constexpr):
    """The lowest bytes of four int32, and the next ones, in a word each."""
    if ASM:
        first, last = chosen_bytes(a, b, "0x5140"), chosen_bytes(c, d, "0x5140")
        return chosen_bytes(first, last, "0x5410"), chosen_bytes(first, last, "0x7632")
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
    high = tl.zeros(words.shape, tl.int32)
    low = high
    for place in tl.static_range(2):
        a = whole(x, gain, past, column, scale, place, T)
        b = whole(x, gain, past, column, scale, place + 2, T)
        c = whole(x, gain, past, column, scale, place + 4, T)
        d = whole(x, gain, past, column, scale, place + 6, T)
        x_low, x_high = packed_bytes(a, b, c, d, T.BYTES == 1)
        x_low = tl.broadcast_to(x_low, words.shape)
        x_high = tl.broadcast_to(x_high, words.shape)
        levels = (words >> (4 * place)) & 0x0F0F0F0F
        high = four_products(levels, x_high, high, False, True, T.BYTES == 1)
        low = four_products(levels, x_low, low, False, False, T.BYTES == 1)
    total *= 8.0
    sums = tl.sum(high * 256 + low, 2, keep_dims=True).to(tl.float32)
    total = tl.sum(total, 2, keep_dims=True)
    return (sums * (1.0 / scale) - total) * factor, square
