"""Launches of stages whose weights may be dense (`kernels.decode.gemv`) or packed (the kernels here)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from blr.kernels.decode.gemv.launch import tokens_of
from blr.kernels.decode.gemv.segments import Run, Segment, in_turn
from blr.kernels.decode.quantized.segments import QuantizedSegment

AnySegment = Segment | QuantizedSegment


class Norm(TypedDict, total=False):
    """The norm of the inputs of all stages, and `pdl` as of `launch_options`."""

    gain: Tensor | None
    eps: float
    pdl: bool


LONG = 4096  # columns of rows in int4 that are not in pairs


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
        return _beside(segments, activation, options)
    runs = _firsts(segments, options)
    if activation:
        runs.append(partial(dual, *segments, activation=activation, **options))
    else:
        runs.append(partial(grouped, segments, add=add, **options))
    return partial(in_turn, runs)


def pays_twice(segments: Sequence[AnySegment]) -> bool:
    """Whether two rows, one after the other, are faster than on tensor cores: of few bits by products of
    bytes. An 8B's layer takes 2 × 49 us for 117 in int3 + 16, 2 × 37 for 79 in int2 + 16, on an H200;
    2 × 44 for 81 in int4."""
    few = all(isinstance(s, QuantizedSegment) and s.bits < 4 for s in segments)
    return few and len(segments[0].x) == 2 and bool(_in_words(next(tokens_of(segments))))


def _long(s: AnySegment) -> bool:
    """Whether gate and up are faster as rows of one launch, their product by another: on an H200 one of
    2 × 14336 rows takes 44 us as a pair in int4 and 31 as rows; corrected, in int2, 43 and 35."""
    if isinstance(s, Segment):
        return False
    return (s.bits == 4 and s.K >= LONG) or s.correction is not None


def _beside(segments: Sequence[AnySegment], activation: str, options: Norm) -> Run:
    from blr.kernels.decode.gemv.gate import gate as run

    y = segments[1].y
    both = torch.empty(len(y), 2 * y.shape[1], dtype=torch.float32, device=y.device)
    halves = [replace(s, y=part) for s, part in zip(segments, both.chunk(2, 1), strict=True)]
    last = partial(run, both, y, activation=activation, pdl=options.get("pdl", False))
    return partial(in_turn, [stages(halves, **options), last])


def grouped(segments: Sequence[AnySegment], *, add: bool = False, **options: Unpack[Norm]) -> None:
    """`segments.grouped` of either kind, of z that are there; neighbours of a format in one launch. add:
    to what the results hold."""
    for (bits, _), found in groupby(segments, key=_format):
        launch: Callable[..., None]
        if bits:
            from blr.kernels.decode.quantized.grouped import grouped as launch
        else:
            from blr.kernels.decode.gemv.grouped import grouped as launch
        launch(list(found), add=add, **options)


def dual(gate: AnySegment, up: AnySegment, *, activation: str, **options: Unpack[Norm]) -> None:
    """`segments.dual` of two segments of one kind. Raises ValueError for two of different kinds."""
    found = {_format(s) for s in (gate, up)}
    if len(found) != 1:
        bits = " and ".join(f"{bits}/{group}" for bits, group in sorted(found))
        raise ValueError(f"dual: weights of {bits} bits/group (0: dense); both must be of one kind")
    launch: Callable[..., None]
    if found == {(0, 0)}:
        from blr.kernels.decode.gemv.grouped import dual as launch
    else:
        from blr.kernels.decode.quantized.grouped import dual as launch
    launch(gate, up, activation=activation, **options)


def _format(s: AnySegment) -> tuple[int, int]:
    return (s.bits, s.group) if isinstance(s, QuantizedSegment) else (0, 0)


def _corrections(segments: Sequence[AnySegment]) -> list[AnySegment]:
    """First stages of the corrections that there are."""
    found = [s.correction for s in segments if isinstance(s, QuantizedSegment)]
    return [correction.first for correction in found if correction is not None]


def _in_words(segments: Sequence[AnySegment]) -> list[QuantizedSegment]:
    """The segments if they are faster by products of bytes (`kernels/decode/integer`), else none."""
    packed = [s for s in segments if isinstance(s, QuantizedSegment)]
    if len(packed) != len(segments):
        return []
    from blr.kernels.decode.integer.form import pays, taken

    return packed if taken(packed) and pays(packed) else []


def _bytewise(
    segments: Sequence[QuantizedSegment], options: Norm, add: bool = False, activation: str = ""
) -> Run:
    """add: to what the results hold. activation: of a pair."""
    if segments[0].bits == 4:
        from blr.kernels.decode.integer.looped import Loop, run_loop

        return partial(run_loop, Loop(segments, **options), add=add, activation=activation)
    from blr.kernels.decode.integer.launch import make_launch, run, takes_first

    firsts = _corrections(segments)
    beside = [s for s in firsts if isinstance(s, QuantizedSegment) and takes_first(s)]
    beside = beside if len(beside) == len(firsts) else []
    before = [] if beside else _firsts(segments, options)
    launch = make_launch(segments, beside, activation=activation, **options)
    return partial(in_turn, [*before, partial(run, launch, add)])


def _firsts(segments: Sequence[AnySegment], options: Norm) -> list[Run]:
    firsts = _corrections(segments)
    return [partial(grouped, firsts, **options)] if firsts else []
