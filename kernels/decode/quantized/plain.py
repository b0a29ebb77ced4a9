"""Levels one by one, and sums of rows by them: slow, and right whatever the inputs are.

What takes the offset of levels off a sum, or makes integers of inputs, gives NaN for an infinite input.
"""

import triton
import triton.language as tl

from blr.kernels.decode.quantized.formats import CURVE, OFFSET, grid_of

BEND = tl.constexpr(CURVE[3])
WHOLE = tl.constexpr(0x4B000000)  # 2^23 in float32, whose last bit is worth 1
# offsets of the grids: of three bits, curved or not, of four, of two
CURVED_THREE, THREE = (tl.constexpr(grid_of(3, curved).offset) for curved in (True, False))
FOUR, TWO = tl.constexpr(OFFSET[4]), tl.constexpr(OFFSET[2])
AT_ONCE = tl.constexpr(256)  # weights: few registers, since fast sums are in the same kernel


@triton.jit
def number_of(code, MIDDLE: tl.constexpr):
    """An integer from 0 to 2^23 - 1 minus MIDDLE in float32, without the slow conversion of integers."""
    return (code | WHOLE).to(tl.float32, bitcast=True) - 8388608.0 - MIDDLE


@triton.jit
def level_of(words, inside, there, BITS: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr,
             MIDDLE: tl.constexpr, CURVED: tl.constexpr):  # fmt: skip
    """What the levels at columns `inside` of groups that begin at `words` stand for where the scale is
    1, as float32. LOW: bits of the lowest plane."""
    EACH: tl.constexpr = GROUP * LOW // 32  # words of the lowest plane
    code = tl.load(words + inside % EACH, mask=there, other=0) >> (inside // EACH * LOW)
    if BITS == 8:
        number = ((code << 24) >> 24).to(tl.float32)
    else:
        code = code & ((1 << LOW) - 1)
        if BITS == 3:
            HIGH: tl.constexpr = GROUP // 32  # words of the highest plane
            bit = tl.load(words + EACH + inside % HIGH, mask=there, other=0) >> (inside // HIGH)
            code = code | ((bit & 1) << 2)
        number = number_of(code, MIDDLE)
    if CURVED:
        number = number * (1.0 + BEND * number * number)
    return number


@triton.jit
def plain_sums(w, scale, x, there, K, T: tl.constexpr):
    """Products [rows] of rows with inputs. w, scale, x: where the words, the scales and the K inputs of
    each begin. there: which rows there are."""
    ROWS: tl.constexpr = w.shape[0]
    LANES: tl.constexpr = AT_ONCE // ROWS if ROWS < AT_ONCE else 1
    ODD: tl.constexpr = CURVED_THREE if T.CURVED else THREE
    MIDDLE: tl.constexpr = ODD if T.BITS == 3 else (FOUR if T.BITS == 4 else TWO)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(0, K, LANES):
        column = (start + tl.arange(0, LANES))[None, :]
        ok, group = there[:, None] & (column < K), column // T.GROUP
        level = level_of(
            w[:, None] + group * T.STEP, column % T.GROUP, ok, T.BITS, T.GROUP, 32 // T.FIELDS,
            MIDDLE, T.CURVED,
        )  # fmt: skip
        factor = tl.load(scale[:, None] + group, mask=ok, other=0.0).to(tl.float32)
        sums += level * factor * tl.load(x[:, None] + column, mask=ok, other=0.0).to(tl.float32)
    return tl.sum(sums, 1)


@triton.jit
def plain_rows(w, w_row, scale, scale_row, x, rows, K, T: tl.constexpr):
    """`plain_sums` [BR] of up to `rows` neighbouring rows with one input."""
    row = tl.arange(0, T.BR)
    return plain_sums(w + row * w_row, scale + row * scale_row, x + row * 0, row < rows, K, T)


@triton.jit
def spoiled(found):
    """Whether sums of rows are not all finite: an input that is not leaves none of a program's so. Asked
    when the sums are stored, where it delays nothing; integers take one instruction a warp."""
    return tl.max(((found * 0.0) != 0.0).to(tl.int32), 0) != 0
