"""Rows of 4 bits times inputs in bytes that every thread makes for itself, once for many tiles.

That takes as long as a tile, so weights of the next tile are on their way while one is multiplied.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate, bias_of, store_rows
from blr.kernels.decode.integer.rows import apart, byte_products, whole
from blr.kernels.decode.quantized.bytes import MAGIC, TOP, packed_bytes
from blr.kernels.decode.quantized.plain import spoiled
from blr.kernels.decode.quantized.triton import plain_tile, row_sums
from blr.kernels.decode.quantized.words import field_inputs, lane_columns, load_chunk, tile_places


@triton.jit
def place_inputs(inputs, PLACE: tl.constexpr, T: tl.constexpr):
    """Inputs [1, lanes, 4] of the four bytes of a place, the largest of them, and the sum of their
    squares before the gain. inputs: pointers as of `words.field_inputs`."""
    x, gain, past = inputs
    a, square = field_inputs(x, gain, past, PLACE * T.WORDS, T)
    b, more = field_inputs(x, gain, past, (PLACE + 2) * T.WORDS, T)
    square += more
    c, more = field_inputs(x, gain, past, (PLACE + 4) * T.WORDS, T)
    square += more
    d, more = field_inputs(x, gain, past, (PLACE + 6) * T.WORDS, T)
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return (a, b, c, d), largest, square + more


@triton.jit
def place_words(found, scale, ASM: tl.constexpr):
    """The high bytes of a place's inputs, the low ones, each four words [1, lanes], and their sum."""
    a, b = whole(found[0], scale), whole(found[1], scale)
    c, d = whole(found[2], scale), whole(found[3], scale)
    low, high = packed_bytes(
        a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True), c.to(tl.int32, bitcast=True),
        d.to(tl.int32, bitcast=True), ASM,
    )  # fmt: skip
    return (apart(high), apart(low)), (a - MAGIC) + (b - MAGIC) + (c - MAGIC) + (d - MAGIC)


@triton.jit
def own_inputs(x, gain, eps, K, OFFSET: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """Inputs of a thread's quad as `byte_products` reads them, what a product of integers [1, lanes] is
    multiplied with, and what is taken from it before. With T.NORM, of inputs after an RMS norm of K."""
    at = lane_columns(T.T * T.BQ, T)
    inputs = x + at, gain + at, at - K
    first, largest, square = place_inputs(inputs, 0, T)
    second, more, squares = place_inputs(inputs, 1, T)
    largest = tl.maximum(tl.max(tl.maximum(largest, more), 2, keep_dims=True), 1e-30)
    factor = tl.reshape(largest, (1, largest.shape[1])) * (1 / TOP)
    if T.NORM:
        square = tl.sum(tl.sum(tl.sum(square + squares, 2), 1), 0)
        factor *= tl.rsqrt(square / (T.T * K) + eps)
    first, total = place_words(first, TOP / largest, ASM)
    second, sums = place_words(second, TOP / largest, ASM)
    return (first, second), factor, tl.sum(total + sums, 2) * OFFSET


@triton.jit
def tile_start(tile, s, T: tl.constexpr):
    """Weights and scales of a tile."""
    start = tile * T.BR
    w_row = s.w_row * T.UNIT
    w, scale = s.w + start.to(tl.int64) * w_row, s.scale + start.to(tl.int64) * s.scale_row
    words, scales = tile_places(w, w_row, scale, s.scale_row, s.rows - start, s.K, T)
    return load_chunk(words, scales, 0, T, T.T * T.BQ)


@triton.jit
def tile_rows(tile, started, s, inputs, T: tl.constexpr, ASM: tl.constexpr):
    """Results of a tile that `tile_start` started: [BR], its rows, and which are there."""
    part, factor = started
    words, scale, total = inputs
    products = byte_products(part, words, 0, 0, T, ASM)
    products = (products - total) * (tl.reshape(factor, products.shape) * scale)
    found, row = row_sums(tl.reshape(products, factor.shape), T.BQ), tile * T.BR + tl.arange(0, T.BR)
    there = row < s.rows
    return found + bias_of(s, row, there, T.BIAS), row, there


@triton.jit
def plain_results(tile, s, T: tl.constexpr):
    """The same of any input (`quantized/plain.py`)."""
    row = tile * T.BR + tl.arange(0, T.BR)
    there = row < s.rows
    return plain_tile(tile, s, T) + bias_of(s, row, there, T.BIAS), row, there


@triton.jit
def not_finite(inputs, T: tl.constexpr):
    """Whether what `own_inputs` gave makes no numbers. False of a norm, which is NaN then anyway."""
    return spoiled(tl.sum(inputs[2], 0)) if T.NORM == 0 else False


@triton.jit
def stage_tiles(first, step, s, x, gain, eps, OFFSET: tl.constexpr, T: tl.constexpr, ADD: tl.constexpr,
                ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Tiles `first`, `first + step`, … of a stage, stored, or added to what its result holds."""
    tiles = tl.cdiv(s.rows, T.BR)
    started = tile_start(first, s, T)
    if PDL:
        gdc_wait()
    inputs = own_inputs(x, gain, eps, s.K, OFFSET, T, ASM)
    bad = not_finite(inputs, T)
    for tile in range(first, tiles, step):
        # The last tile is read twice, the second time from a cache, so that loads need no mask.
        following = tile_start(tl.minimum(tile + step, tiles - 1), s, T)
        found, row, there = tile_rows(tile, started, s, inputs, T, ASM)
        store_rows(s.y, found, row, there if T.NORM > 0 else there & (not bad), ADD)
        started = following
    if T.NORM == 0:  # noqa: SIM102 (known when compiled, the rest is not)
        if bad:
            for tile in range(first, tiles, step):
                found, row, there = plain_results(tile, s, T)
                store_rows(s.y, found, row, there, ADD)


@triton.jit
def loop_kernel(
    s0, s1, s2, ends, x, gain, eps, COUNT: tl.constexpr, OFFSET: tl.constexpr, T0: tl.constexpr,
    T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments of the same inputs x; ends: programs up to the end of each."""
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0)
    if at < ends[0]:
        stage_tiles(at, ends[0], s0, x, gain, eps, OFFSET, T0, ADD, ASM, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (at >= ends[0]) & (at < ends[1]):
            step = ends[1] - ends[0]
            stage_tiles(at - ends[0], step, s1, x, gain, eps, OFFSET, T1, ADD, ASM, PDL)
    if COUNT > 2:  # noqa: SIM102
        if at >= ends[1]:
            step = ends[2] - ends[1]
            stage_tiles(at - ends[1], step, s2, x, gain, eps, OFFSET, T2, ADD, ASM, PDL)


@triton.jit
def pair_kernel(
    gate, up, programs, x, gain, eps, OFFSET: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    ACT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same tiles of two stages of one input, and ``act(gate) ⊙ up`` into the second's result."""
    if PDL:
        gdc_launch_dependents()
    at = tl.program_id(0)
    tiles = tl.cdiv(up.rows, T1.BR)
    gates, ups = tile_start(at, gate, T0), tile_start(at, up, T1)
    if PDL:
        gdc_wait()
    inputs = own_inputs(x, gain, eps, up.K, OFFSET, T0, ASM)
    for tile in range(at, tiles, programs):
        after = tl.minimum(tile + programs, tiles - 1)
        first, row, there = tile_rows(tile, gates, gate, inputs, T0, ASM)
        gates = tile_start(after, gate, T0)
        second, row, there = tile_rows(tile, ups, up, inputs, T1, ASM)
        ups = tile_start(after, up, T1)
        found = activate(first, ACT) * second
        store_rows(up.y, found, row, there, False)
    if T0.NORM == 0:  # noqa: SIM102
        if not_finite(inputs, T0):
            for tile in range(at, tiles, programs):
                first, row, there = plain_results(tile, gate, T0)
                second, row, there = plain_results(tile, up, T1)
                store_rows(up.y, activate(first, ACT) * second, row, there, False)
