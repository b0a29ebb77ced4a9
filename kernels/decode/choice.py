"""Which kernels run stages of decoding and packed layers: one table, by bits, tokens and shape.

What a kernel cannot take is for the next rule: `integer.launch.taken`, `skinny.launch.fits`,
`layers.packed.launch.kernels_for`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from math import prod
from typing import NamedTuple

from blr.kernels.decode.gemv.launch import grouped as plain_grouped
from blr.kernels.decode.gemv.launch import side_by_side, tokens_of
from blr.kernels.decode.gemv.segments import (
    PLAIN,
    SEVERAL,
    USUAL,
    AnySegment,
    How,
    QuantizedSegment,
    Run,
    Segment,
    in_turn,
)
from blr.kernels.decode.quantized.formats import BITS, GROUPS, form_of

ENDLESS = 1 << 62
LONG = 4096  # columns of rows in int4 that are not in pairs


class Rule(NamedTuple):
    """Where some kernels are the fastest of those timed on an H200 (scripts/log); the first rule that
    holds counts.

    bits, groups: of the weights. tokens, weights: least and most, of all stages of a launch. quads: of
    16 bytes in a row, at least. even: whether each thread of a row must have one.
    """

    kernels: str
    bits: tuple[int, ...]
    tokens: tuple[int, int]
    weights: tuple[int, int] = (0, ENDLESS)
    groups: tuple[int, ...] = GROUPS
    quads: int = 0
    even: bool = False

    def holds(self, bits: int, group: int, tokens: int, weights: int, K: int) -> bool:
        """Whether it is for so many tokens and weights with rows of K columns."""
        fits = bits in self.bits and self.tokens[0] <= tokens <= self.tokens[1]
        fits = fits and self.weights[0] <= weights <= self.weights[1]
        if bits == PLAIN or not fits:
            return fits
        quads = form_of(bits, group).quads(K)
        even = quads > EVEN or quads & (quads - 1) == 0
        return group in self.groups and quads >= self.quads and (even or not self.even)


EVEN = 128  # quads of a row, above which idle threads do not count
ANY = (PLAIN, *BITS)
# Products of bytes: two bits take 3.4 µs for 8.6 at 2048 × 2048, four 2.6 for 3.8 at 512 × 2048, but 4.6
# for 4.0 at 3072 × 3072. Two rows one after the other: 2 × 49 µs for 117 in int3 + 16, 2 × 37 for 79 in
# int2 + 16, 2 × 44 for 81 in int4 (an 8B's layer).
STAGES = (
    Rule("integer", (2, 3), (1, 2), (1 << 22, ENDLESS)),
    Rule("integer", (4,), (1, 1), (1 << 25, ENDLESS), quads=64),
    Rule("integer", (4,), (1, 1), (1 << 20, ENDLESS), quads=64, even=True),
    Rule("skinny", ANY, (2, 64)),
    Rule("rows", ANY, (1, ENDLESS)),
)
SQUARE, SMALL = 1 << 24, 1 << 22  # weights
LAYERS = (
    Rule("rows", BITS, (1, 1)),
    Rule("few", (4,), (2, 8), groups=(128, 64)),
    Rule("few", (4,), (9, 16), (0, SQUARE), (128, 64)),
    Rule("few", (3, 2), (2, 16), groups=(128,)),
    Rule("fused", (4, 2), (2, 768), (SQUARE + 1, ENDLESS)),
    Rule("fused", (3,), (2, 512), (SQUARE + 1, ENDLESS)),
    Rule("fused", BITS, (2, 256), (SMALL + 1, ENDLESS)),
    Rule("fused", BITS, (2, 128)),
    Rule("plain", BITS, (0, ENDLESS)),  # as numbers, by the library
)
RULES = {"stages": STAGES, "layers": LAYERS}


@cache
def chosen(rules: str, bits: int, group: int, tokens: int, weights: int, K: int, *without: str) -> str:
    """The kernels of the first of these `RULES` that holds, of none `without`."""
    size = bits, group, tokens, weights, K
    return next(r.kernels for r in RULES[rules] if r.kernels not in without and r.holds(*size))


def kernels_for(segments: Sequence[AnySegment], like: int = 1) -> str:
    """The kernels of `STAGES` that run the stages of one launch. like: a token's sums are those of a
    pass of so many tokens, bit for bit."""
    one, weights = segments[0], sum(prod(s.shape) for s in segments)
    tokens = max(len(one.x), like) if like >= SEVERAL else 1
    without = () if _in_bytes(segments) else ("integer",)
    return chosen("stages", one.bits, one.group, tokens, weights, one.shape[2], *without)


def _in_bytes(segments: Sequence[AnySegment]) -> bool:
    """Whether products of bytes take the stages of one token."""
    packed = [s for s in next(tokens_of(segments)) if isinstance(s, QuantizedSegment)]
    if len(packed) < len(segments):
        return False
    from blr.kernels.decode.integer.launch import taken

    return taken(packed)


def stages(segments: Sequence[AnySegment], how: How = USUAL) -> Run:
    """The function that runs stages on the CUDA cores, each stored or added to its result, or with an
    activation ``act(gate) ⊙ up`` of two. Several rows of packed weights run one after the other;
    corrections are added by a launch of their first stages and then of the layers."""
    if len(segments[0].x) > 1 and not all(isinstance(s, Segment) for s in segments):
        return partial(in_turn, [stages(s, how) for s in tokens_of(segments)])
    if kernels_for(segments) == "integer":
        return bytewise([s for s in segments if isinstance(s, QuantizedSegment)], how)
    if how.activation and any(map(_long, segments)):
        halves, last = side_by_side(segments, how)
        return partial(in_turn, [stages(halves, replace(how, activation="")), last])
    return partial(in_turn, [*_firsts(segments, how), partial(grouped, segments, how)])


def _long(s: AnySegment) -> bool:
    """Whether gate and up are faster as rows of one launch, their product by another: on an H200 one of
    2 × 14336 rows takes 44 us as a pair in int4 and 31 as rows; corrected, in int2, 43 and 35."""
    return (s.bits == 4 and s.shape[2] >= LONG) or s.correction is not None


def grouped(segments: Sequence[AnySegment], how: How = USUAL) -> None:
    """`segments.grouped` of either kind, of z that are there, or `segments.dual` of two of one format;
    neighbours of a format in one launch."""
    for (bits, _), found in groupby(segments, key=lambda s: (s.bits, s.group)):
        launch: Callable[..., None] = plain_grouped
        if bits != PLAIN:
            from blr.kernels.decode.quantized.launch import grouped as launch
        launch(list(found), how)


def bytewise(segments: Sequence[QuantizedSegment], how: How) -> Run:
    """A function that runs stages of one token by products of bytes, their corrections included."""
    from blr.kernels.decode.integer.launch import byte_stages, takes_first

    firsts = [s.correction.first for s in segments if s.correction is not None]
    beside = [s for s in firsts if isinstance(s, QuantizedSegment) and takes_first(s)]
    if len(beside) == len(firsts):
        return byte_stages(segments, beside, how)
    return partial(in_turn, [*_firsts(segments, how), byte_stages(segments, (), how)])


def _firsts(segments: Sequence[AnySegment], how: How) -> list[Run]:
    """What runs the first stages of the corrections that there are."""
    firsts = [s.correction.first for s in segments if s.correction is not None]
    return [partial(grouped, firsts, replace(how, add=False, activation=""))] if firsts else []
