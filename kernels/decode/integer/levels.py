"""Levels of 2, 3 and 4 bits as bytes, four of which `dp4a` multiplies with four of the inputs.

Levels are bytes where they lie, masked and not moved: those of the place p are 4^p (of four bits 16^p)
times as large, so sums go from the last place to the first and are shifted between. Three bits look
their levels up in a table of eight bytes (`prmt`).
"""

import triton
import triton.language as tl

from blr.kernels.decode.quantized.bytes import four_products


@triton.jit
def apart(words):
    """[RT, lanes] of each of the four words of quads [RT, lanes, 4]."""
    pairs = tl.reshape(words, (words.shape[0], words.shape[1], 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def looked_up(words, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The bytes of a table of eight, in two words, for the four nibbles of a half of words."""
    if HALF == 1:
        words = words >> 16
    if ASM:
        # Constants of the asm itself would be spelled at each use; registers hold them once.
        low = tl.full(words.shape, LOW, tl.int32)
        high = tl.full(words.shape, HIGH, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, words], tl.int32, True, 1
        )
    else:
        found = tl.zeros(words.shape, tl.int32)
        for byte in tl.static_range(4):
            level = (words >> (4 * byte)) & 7
            table = tl.where(level < 4, LOW, HIGH) >> (level % 4 * 8)
            found = found | ((table & 255) << (8 * byte))
        return found


@triton.jit
def levels(
    tile, WORD: tl.constexpr, PLACE: tl.constexpr, LOW, HIGH, BITS: tl.constexpr, ASM: tl.constexpr
):
    """The levels of place PLACE of word WORD of a tile taken `apart`, as bytes [RT, lanes]."""
    if BITS == 3:
        return looked_up(tile[PLACE // 2][WORD], PLACE % 2, LOW, HIGH, ASM)
    elif BITS == 4:
        return tile[0][WORD] & (0x0F0F0F0F if PLACE == 0 else -0x0F0F0F10)
    elif PLACE == 0:
        return tile[0][WORD] & 0x03030303
    elif PLACE == 1:
        return tile[0][WORD] & 0x0C0C0C0C
    elif PLACE == 2:
        return tile[0][WORD] & 0x30303030
    else:
        return tile[0][WORD] & -0x3F3F3F40


@triton.jit
def byte_products(
    tile, inputs, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr
):
    """[RT, lanes] sums of levels as bytes times inputs as integers, in float32. inputs: for every place
    the four words [1, lanes] of high bytes, and those of low ones."""
    PLACES: tl.constexpr = 2 if T.BITS == 4 else 4
    SIGNED: tl.constexpr = T.BITS == 3
    parts = (apart(tile[0]), apart(tile[len(tile) - 1]))
    high = tl.zeros(parts[0][0].shape, tl.int32)
    low = high
    for back in tl.static_range(PLACES):
        x_high, x_low = inputs[PLACES - 1 - back]
        if T.BITS != 3:
            high = high >> T.BITS
            low = low >> T.BITS
        for i in tl.static_range(4):
            some = levels(parts, i, PLACES - 1 - back, LOW, HIGH, T.BITS, ASM)
            high = four_products(some, tl.broadcast_to(x_high[i], some.shape), high, SIGNED, True, ASM)
            low = four_products(some, tl.broadcast_to(x_low[i], some.shape), low, SIGNED, False, ASM)
    return (high * 256 + low).to(tl.float32)
