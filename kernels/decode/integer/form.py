"""How inputs lie in words for products of bytes, and which stages are multiplied so: for host and
kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.decode.gemv.launch import power_of_two
from blr.kernels.decode.quantized.formats import OFFSET, form_of
from blr.kernels.decode.quantized.segments import QuantizedSegment

# Curved levels of three bits as bytes: x (1 + x²/50) of x = q − 3.5, times a number that brings all of
# them near whole ones. Their error, .18% (rms of Gaussian weights), is that of rounding to bfloat16.
THREE = (14, 44, 79, 122)
THREE_SCALE = 28.0447
PLACES = {2: 4, 3: 4}  # words of bytes that a word, or a pair of nibbles' words, comes apart into
WIDEST = {2: 512, 3: 512, 4: 256}  # quads of a row at most: each has a thread
# Weights of a launch from which it is faster, on an H200: two bits at 2048 × 2048 (3.4 µs for 8.6) and
# wherever it was tried above, four at 512 × 2048 (2.6 for 3.8), but for rows of few quads that leave
# threads without one (3072 × 3072: 4.6 for 4.0). Shorter rows were not tried.
LEAST = {2: 1 << 22, 3: 1 << 22, 4: 1 << 20}
SHORTEST, FEW, LARGE = 64, 128, 1 << 25  # quads; few quads; weights from which those are faster, too


def offset_of(bits: int) -> float:
    """What is taken from levels as bytes."""
    return 0.0 if bits == 3 else OFFSET[bits]


def unit_of(bits: int, curved: bool = True) -> float:
    """What a level as byte is of what it stands for."""
    return THREE_SCALE if bits == 3 and curved else 1.0


class Inputs(NamedTuple):
    """One token's inputs as products read them.

    words: [PLACES · 2, quads, 4] int32, of each place the high bytes, then the low ones. sums: [2,
    quads] float32, what a product of integers is multiplied with, and what is taken from it before.
    quads: a power of two, zero where a row has none.
    """

    words: Tensor
    sums: Tensor


def make_inputs(s: QuantizedSegment) -> Inputs:
    """Room for the inputs of a stage."""
    quads = lanes(s)
    words = torch.empty(2 * PLACES[s.bits], quads, 4, dtype=torch.int32, device=s.x.device)
    return Inputs(words, torch.empty(2, quads, dtype=torch.float32, device=s.x.device))


def lanes(s: QuantizedSegment) -> int:
    """Quads of a row, and of its inputs, as a power of two."""
    return max(power_of_two(form_of(s.bits, s.group).quads(s.K)), 4)


def row_warps(s: QuantizedSegment) -> int:
    """Warps of a program of rows, of which every quad has a thread."""
    return max(lanes(s) // 32, 4)


def taken(segments: Sequence[QuantizedSegment]) -> bool:
    """Whether stages have the same inputs and are of a kind that products of bytes take."""
    first = segments[0]
    kinds = {(s.x.data_ptr(), s.x.shape, s.bits, s.group, s.K, s.curved) for s in segments}
    fits = first.bits in WIDEST and form_of(first.bits, first.group).WORDS >= 4
    fits = fits and lanes(first) <= WIDEST[first.bits] and len(kinds) == 1 and len(segments) <= 3
    fits = fits and (first.bits < 4 or all(s.correction is None for s in segments))
    return fits and len(first.x) == 1 and first.x.shape[1] == first.K and all(map(is_plain, segments))


def is_plain(s: QuantizedSegment) -> bool:
    """Whether a stage has one block, and half precision."""
    return s.mix is None and s.packed.shape[0] == 1 and s.scale.dtype.itemsize <= 2


def pays(segments: Sequence[QuantizedSegment]) -> bool:
    """Whether it was measured to be faster so."""
    first, weights = segments[0], sum(s.packed.shape[1] * s.K for s in segments)
    if first.bits < 4:
        return weights >= LEAST[first.bits]
    quads = form_of(first.bits, first.group).quads(first.K)
    return quads >= SHORTEST and weights >= (LARGE if quads < lanes(first) <= FEW else LEAST[4])
