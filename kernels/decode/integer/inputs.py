"""Inputs of a token, normed once and left as words of bytes, and V x of corrections beside them.

A product of bytes (`rows.py`) reads four inputs in a word, their high bytes or their low ones, in the
order in which the levels of a word of weights come apart (`place_field`). An input is an integer of 16
bits with a scale a quad: half a step is 2^-16 of the largest of its 32 or 64 inputs.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.quantized.bytes import MAGIC, TOP, packed_bytes
from blr.kernels.decode.quantized.grouped import run_segment
from blr.kernels.decode.quantized.words import column_at

AT_ONCE = tl.constexpr(4096)  # inputs that are squared at once


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
        v = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        square += v * v
    return tl.rsqrt(tl.sum(square, 0) / K + eps)


@triton.jit
def some_inputs(x, gain, column, K, NORM: tl.constexpr):
    """Inputs at columns, times their gain if NORM, in float32, zero outside."""
    v = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    if NORM:
        v *= tl.load(gain + column, mask=column < K, other=0.0).to(tl.float32)
    return v


@triton.jit
def largest_of(a, b):
    """[quads] of two tensors [places, quads, 4]: the larger magnitudes."""
    return tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 2), 0)


@triton.jit
def whole(v, scale):
    """Numbers times a scale a quad, as floats whose last bits are those of the nearest integer."""
    return v * scale[None, :, None] + MAGIC


@triton.jit
def pack_quads(
    program, x, gain, eps, words, sums, K, quads, OFFSET: tl.constexpr, STEP: tl.constexpr,
    PLACES: tl.constexpr, BQ: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """BQ quads of the inputs. words, sums: of `form.Inputs`, `quads` wide. OFFSET, STEP: what is taken
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
    scale = TOP / largest
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
