"""Rows of 2 and 3 bits times inputs in words of bytes, four of which `dp4a` multiplies with four levels.

A launch norms and packs the inputs of a token, with V x of corrections beside them; then one has the
rows.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate, bias_of, input_chunk, store_rows
from blr.kernels.decode.quantized.bytes import MAGIC, TOP, four_products, packed_bytes
from blr.kernels.decode.quantized.plain import spoiled
from blr.kernels.decode.quantized.triton import (
    correction,
    plain_tile,
    row_sums,
    run_segment,
    stage_start,
)
from blr.kernels.decode.quantized.words import column_at

AT_ONCE = tl.constexpr(4096)  # inputs that are squared at once


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
    else:
        return tile[0][WORD] & (-0x3F3F3F40 if PLACE == 3 else 0x03030303 << 2 * PLACE)


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


@triton.jit
def place_field(place, BYTE: tl.constexpr, BITS: tl.constexpr):
    """The field of a word whose level is in byte BYTE of word `place` that it comes apart into."""
    if BITS == 3:
        return 8 * (place % 2) + 2 * BYTE + place // 2
    else:
        return 8 // BITS * BYTE + place


@triton.jit
def inverse_rms(x, K, eps):
    """One over the root mean square of K inputs."""
    square = tl.zeros([AT_ONCE], tl.float32)
    for start in range(0, K, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        v = input_chunk(x, at, K)
        square += v * v
    return tl.rsqrt(tl.sum(square, 0) / K + eps)


@triton.jit
def some_inputs(x, gain, column, K, NORM: tl.constexpr):
    """Inputs at columns, times their gain if NORM, in float32, zero outside."""
    v = input_chunk(x, column, K)
    return v * input_chunk(gain, column, K) if NORM else v


@triton.jit
def largest_of(a, b):
    """[quads] of two tensors [places, quads, 4]: the larger magnitudes."""
    return tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 2), 0)


@triton.jit
def whole(v, scale):
    """Numbers times a scale, as floats whose last bits are those of the nearest integer."""
    return v * scale + MAGIC


@triton.jit
def pack_quads(
    program, x, gain, eps, words, sums, K, quads, OFFSET: tl.constexpr, STEP: tl.constexpr,
    PLACES: tl.constexpr, BQ: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BQ quads of the inputs. words, sums: of `launch.Inputs`, `quads` wide. OFFSET, STEP: what is taken
    from levels as bytes, and one over what they are multiples of."""
    place = tl.arange(0, PLACES)[:, None, None]
    quad = program * BQ + tl.arange(0, BQ)
    word = tl.arange(0, 4)[None, None, :]
    column = column_at(quad[None, :, None], word, T)
    a = some_inputs(x, gain, column + place_field(place, 0, T.BITS) * T.WORDS, K, NORM)
    b = some_inputs(x, gain, column + place_field(place, 1, T.BITS) * T.WORDS, K, NORM)
    c = some_inputs(x, gain, column + place_field(place, 2, T.BITS) * T.WORDS, K, NORM)
    d = some_inputs(x, gain, column + place_field(place, 3, T.BITS) * T.WORDS, K, NORM)
    largest = tl.maximum(tl.maximum(largest_of(a, b), largest_of(c, d)), 1e-30)
    scale = TOP / largest[None, :, None]
    a, b, c, d = whole(a, scale), whole(b, scale), whole(c, scale), whole(d, scale)
    total = tl.sum(tl.sum((a - MAGIC) + (b - MAGIC) + (c - MAGIC) + (d - MAGIC), 2), 0)
    low, high = packed_bytes(
        a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True), c.to(tl.int32, bitcast=True),
        d.to(tl.int32, bitcast=True), ASM,
    )  # fmt: skip
    to = words + ((place * 2 * quads + quad[None, :, None]) * 4 + word)
    tl.store(to, high)
    tl.store(to + quads * 4, low)
    factor = largest * (STEP / TOP)
    if NORM:
        factor *= inverse_rms(x, K, eps)
    tl.store(sums + quad, factor)
    tl.store(sums + quads + quad, total * OFFSET)


@triton.jit
def inputs_kernel(
    x, gain, eps, words, sums, K, quads, v0, v1, v2, ends, OFFSET: tl.constexpr, STEP: tl.constexpr,
    PLACES: tl.constexpr, BQ: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First the programs of COUNT stages v0, …, up to `ends` of each, then those that pack."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if COUNT > 0:  # noqa: SIM102 (known when compiled, the rest is not)
        if program < ends[0]:
            run_segment(program, v0, gain, eps, V0, False, PDL)
    if COUNT > 1:  # noqa: SIM102
        if (program >= ends[0]) & (program < ends[1]):
            run_segment(program - ends[0], v1, gain, eps, V1, False, PDL)
    if COUNT > 2:  # noqa: SIM102
        if (program >= ends[1]) & (program < ends[2]):
            run_segment(program - ends[1], v2, gain, eps, V2, False, PDL)
    if program >= ends[2]:
        if PDL:
            gdc_wait()
        pack_quads(
            program - ends[2], x, gain, eps, words, sums, K, quads, OFFSET, STEP, PLACES, BQ, T, NORM,
            ASM,
        )  # fmt: skip


@triton.jit
def input_words(words, plane, quads, T: tl.constexpr):
    """The four words of inputs [1, lanes] of a plane of `launch.Inputs`, lane l being quad l % BQ."""
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
    found = tile_sums(started, inputs, LOW, HIGH, T, ASM)
    store_rows(s.y, found + more, started[4], started[5], False)
    if T.NORM == 0:  # noqa: SIM102 (known when compiled)
        if spoiled(found):
            store_rows(s.y, plain_tile(tile, s, T) + more, started[4], started[5], False)


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
    first = activate(tile_sums(gates, inputs, LOW, HIGH, T0, ASM) + one, ACT)
    second = tile_sums(ups, inputs, LOW, HIGH, T1, ASM)
    store_rows(up.y, first * (second + two), ups[4], ups[5], False)
    if T1.NORM == 0:  # noqa: SIM102 (known when compiled)
        if spoiled(second):
            first = activate(plain_tile(tile, gate, T0) + one, ACT)
            store_rows(up.y, first * (plain_tile(tile, up, T1) + two), ups[4], ups[5], False)
