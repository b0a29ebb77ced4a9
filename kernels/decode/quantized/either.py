"""Launches of stages whose weights may be dense (`kernels.decode.gemv`) or packed (the kernels here)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from blr.kernels.decode.gemv.launch import gate, tokens_of
from blr.kernels.decode.gemv.launch import grouped as plain_grouped
from blr.kernels.decode.gemv.segments import PLAIN, AnySegment, QuantizedSegment, Run, Segment, in_turn

LONG = 4096  # columns of rows in int4 that are not in pairs


class Norm(TypedDict, total=False):
    """The norm of the inputs of all stages, and `pdl` as of `launch_options`."""

    gain: Tensor | None
    eps: float
    pdl: bool


def stages(
    segments: Sequence[AnySegment], *, add: bool = False, activation: str = "", **options: Unpack[Norm]
) -> Run:
    """The function that runs stages, each stored or added to its result, or with an activation
    ``act(gate) ⊙ up`` of two. options: of `grouped`.

    Several rows of packed weights run one after the other. Where products of bytes pay, it is those of
    `kernels/decode/integer`. Else corrections are added by a launch of their first stages and then of
    the layers.
    """
    if len(segments[0].x) > 1 and not all(isinstance(s, Segment) for s in segments):
        tokens = [stages(s, add=add, activation=activation, **options) for s in tokens_of(segments)]
        return partial(in_turn, tokens)
    if packed := _in_words(segments):
        return _bytewise(packed, options, add=add, activation=activation)
    if activation and any(map(_long, segments)):
        y = segments[1].y
        both = torch.empty(len(y), 2 * y.shape[1], dtype=torch.float32, device=y.device)
        halves = [replace(s, y=part) for s, part in zip(segments, both.chunk(2, 1), strict=True)]
        last = partial(gate, both, y, activation=activation, pdl=options.get("pdl", False))
        return partial(in_turn, [stages(halves, **options), last])
    run = partial(grouped, segments, add=add, activation=activation, **options)
    return partial(in_turn, [*_firsts(segments, options), run])


def pays_twice(segments: Sequence[AnySegment]) -> bool:
    """Whether two rows, one after the other, are faster than on tensor cores: of few bits by products of
    bytes. An 8B's layer takes 2 × 49 us for 117 in int3 + 16, 2 × 37 for 79 in int2 + 16, on an H200;
    2 × 44 for 81 in int4."""
    few = len(segments[0].x) == 2 and all(s.bits < 4 for s in segments)
    return few and bool(_in_words(next(tokens_of(segments))))


def _long(s: AnySegment) -> bool:
    """Whether gate and up are faster as rows of one launch, their product by another: on an H200 one of
    2 × 14336 rows takes 44 us as a pair in int4 and 31 as rows; corrected, in int2, 43 and 35."""
    return (s.bits == 4 and s.shape[2] >= LONG) or s.correction is not None


def grouped(
    segments: Sequence[AnySegment], *, add: bool = False, activation: str = "", **options: Unpack[Norm]
) -> None:
    """`segments.grouped` of either kind, of z that are there; neighbours of a format in one launch. add:
    to what the results hold. activation: `segments.dual` of two, of one format.

    Raises ValueError for a pair of two formats.
    """
    if activation and len({*map(_format, segments)}) > 1:
        kinds = " and ".join(f"{bits}/{group}" for bits, group in sorted(map(_format, segments)))
        raise ValueError(f"dual: weights of {kinds} bits/group (16: dense); both must be of one kind")
    for (bits, _), found in groupby(segments, key=_format):
        launch: Callable[..., None] = plain_grouped
        if bits != PLAIN:
            from blr.kernels.decode.quantized.launch import grouped as launch
        launch(list(found), add=add, activation=activation, **options)


def _format(s: AnySegment) -> tuple[int, int]:
    return s.bits, s.group


def _in_words(segments: Sequence[AnySegment]) -> list[QuantizedSegment]:
    """The segments if they are faster by products of bytes (`kernels/decode/integer`), else none."""
    packed = [s for s in segments if isinstance(s, QuantizedSegment)]
    if len(packed) != len(segments):
        return []
    from blr.kernels.decode.integer.launch import pays, taken

    return packed if taken(packed) and pays(packed) else []


def _bytewise(
    segments: Sequence[QuantizedSegment], options: Norm, add: bool = False, activation: str = ""
) -> Run:
    """add: to what the results hold. activation: of a pair."""
    from blr.kernels.decode.integer.launch import byte_stages, takes_first

    firsts = [s.correction.first for s in segments if s.correction is not None]
    beside = [s for s in firsts if isinstance(s, QuantizedSegment) and takes_first(s)]
    beside = beside if len(beside) == len(firsts) else []
    before = [] if beside else _firsts(segments, options)
    run = byte_stages(segments, beside, add=add, activation=activation, **options)
    return partial(in_turn, [*before, run])


def _firsts(segments: Sequence[AnySegment], options: Norm) -> list[Run]:
    """What runs the first stages of the corrections that there are."""
    firsts = [s.correction.first for s in segments if s.correction is not None]
    return [partial(grouped, firsts, **options)] if firsts else []
