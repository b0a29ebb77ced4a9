"""Rows of 2 and 3 bits times inputs in words of bytes, made by a launch before (`inputs.py`).

A thread has a quad of `RT` rows (`kernels/decode/quantized`) and the words of its inputs in registers:
what is left a weight is half an instruction of products and a quarter or two of logic.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate, bias_of, store_rows
from blr.kernels.decode.integer.levels import apart, byte_products
from blr.kernels.decode.quantized.correction import correction
from blr.kernels.decode.quantized.triton import row_sums, stage_start


@triton.jit
def input_words(words, plane, quads, T: tl.constexpr):
    """The four words of inputs [1, lanes] of a plane of `form.Inputs`, lane l being quad l % BQ."""
    LANES: tl.constexpr = T.T * T.BQ
    index = tl.arange(0, LANES * 4)
    at = words + plane * quads * 4 + (index // 4 % T.BQ * 4 + index % 4)
    return apart(tl.reshape(tl.load(at), (1, LANES, 4)))


@triton.jit
def all_inputs(words, quads, T: tl.constexpr):
    """`input_words` of every place: of high bytes and of low ones."""
    first = input_words(words, 0, quads, T), input_words(words, 1, quads, T)
    second = input_words(words, 2, quads, T), input_words(words, 3, quads, T)
    third = input_words(words, 4, quads, T), input_words(words, 5, quads, T)
    fourth = input_words(words, 6, quads, T), input_words(words, 7, quads, T)
    return first, second, third, fourth


@triton.jit
def tile_inputs(words, sums, quads, T: tl.constexpr):
    """What the lanes of a tile multiply with, and, a number a lane, what products of integers are
    multiplied with and what is taken from them before."""
    lane = tl.arange(0, T.T * T.BQ) % T.BQ
    return (
        all_inputs(words, quads, T),
        tl.load(sums + lane)[None, :],
        tl.load(sums + quads + lane)[None, :],
    )


@triton.jit
def tile_sums(
    started, inputs, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr
):
    """[BR] products of a tile that `stage_start` started."""
    words, scale, total = inputs
    chunk, factor = started[0]
    products = byte_products(chunk, words, LOW, HIGH, T, ASM)
    products = (products - total) * (tl.reshape(factor, products.shape) * scale)
    return row_sums(tl.reshape(products, factor.shape), T.BQ)


@triton.jit
def added(started, s, T: tl.constexpr, ADD: tl.constexpr):
    """[BR] that products are added to: the correction, the bias, what the result holds if ADD. Loaded
    before the products, for which it would else wait once more."""
    out, ok, narrow = started[4], started[5], started[6]
    found = correction(s, narrow, T) + bias_of(s, out, ok, T.BIAS)
    if ADD:
        found += tl.load(s.y + out, mask=ok, other=0.0).to(tl.float32)
    return found


@triton.jit
def tile_rows(tile, s, words, sums, quads, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
              ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile of a stage, stored, or added to what its result holds."""
    started = stage_start(tile, s, T)
    if PDL:
        gdc_wait()
    inputs = tile_inputs(words, sums, quads, T)
    more = added(started, s, T, ADD)
    found = tile_sums(started, inputs, LOW, HIGH, T, ASM) + more
    store_rows(s.y, found, started[4], started[5], False)


@triton.jit
def rows_kernel(
    s0, s1, s2, ends, words, sums, quads, COUNT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments of the same inputs; ends: programs up to the end of each."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < ends[0]:
        tile_rows(program, s0, words, sums, quads, LOW, HIGH, T0, ADD, ASM, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= ends[0]) & (program < ends[1]):
            tile_rows(program - ends[0], s1, words, sums, quads, LOW, HIGH, T1, ADD, ASM, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= ends[1]:
            tile_rows(program - ends[1], s2, words, sums, quads, LOW, HIGH, T2, ADD, ASM, PDL)


@triton.jit
def gated_kernel(
    gate, up, words, sums, quads, LOW: tl.constexpr, HIGH: tl.constexpr, T0: tl.constexpr,
    T1: tl.constexpr, ACT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same tiles of two stages of one input, and ``act(gate) ⊙ up`` into the second's result."""
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    gates, ups = stage_start(tile, gate, T0), stage_start(tile, up, T1)
    if PDL:
        gdc_wait()
    inputs = tile_inputs(words, sums, quads, T0)
    one, two = added(gates, gate, T0, False), added(ups, up, T1, False)
    found = activate(tile_sums(gates, inputs, LOW, HIGH, T0, ASM) + one, ACT)
    found *= tile_sums(ups, inputs, LOW, HIGH, T1, ASM) + two
    store_rows(up.y, found, ups[4], ups[5], False)
