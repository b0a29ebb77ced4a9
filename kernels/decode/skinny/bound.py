"""Functions that run the stages of a phase on tensor cores, their inputs prepared before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from blr.kernels.decode.gemv.segments import Run, Segment, in_turn
from blr.kernels.decode.quantized.segments import Correction, Narrow, QuantizedSegment
from blr.kernels.decode.skinny.launch import (
    AnySegment,
    Order,
    PartialSums,
    dual,
    fits,
    format_of,
    grouped,
    low_of,
    width_of,
)


@dataclass(frozen=True)
class SkinnyOptions:
    """Options of a launch on tensor cores.

    dtype: of the model. gain, eps: of the norm of their inputs. add: to what the results hold.
    activation: of a pair. order: as of `launch.grouped`. ordered: whether inputs are there in the order
    of these weights. pdl: see `launch_options`. like: as of `launch.grouped`.
    """

    workspace: PartialSums
    dtype: torch.dtype
    gain: Tensor | None = None
    eps: float = 0.0
    add: bool = False
    activation: str = ""
    order: Order = None
    ordered: bool = False
    pdl: bool = False
    like: int | None = None


def stages(segments: Sequence[AnySegment], how: SkinnyOptions) -> Run | None:
    """What runs stages; None if these kernels do not take them."""
    parts = [list(part) for _, part in groupby(segments, key=format_of)]
    if len(parts) > 1:
        runs = [stages(part, how) for part in parts]
        found = [run for run in runs if run is not None]
        return partial(in_turn, found) if len(found) == len(runs) else None
    if any(s.mix is not None for s in segments):
        return None if how.add else _mixed(segments, how)
    if not fits(segments, how.dtype):
        return None
    if not all(map(_correctable, segments)):
        return _corrected_after(segments, how)
    before, ready = _inputs(segments, how)
    options: dict[str, Any] = {"order": how.order, "pdl": how.pdl, "like": how.like}
    if how.activation:
        gate, up = ready
        run = partial(dual, gate, up, how.workspace, activation=how.activation, **options)
    else:
        run = partial(grouped, ready, how.workspace, add=how.add, **options)
    return partial(in_turn, [*before, run])


def _mixed(segments: Sequence[AnySegment], how: SkinnyOptions) -> Run | None:
    """The same of BLAST's first factors, whose products are mixed behind them."""
    from blr.kernels.decode.skinny.mix import fits as mixable
    from blr.kernels.decode.skinny.mix import mix

    if not mixable([s.mix for s in segments]):
        return None
    inner = [replace(s, y=torch.zeros(s.y.shape, device=s.y.device), mix=None) for s in segments]
    if (run := stages(inner, replace(how, order=None))) is None:
        return None
    layers = [(z.y, s.mix, s.y) for z, s in zip(inner, segments, strict=True) if s.mix is not None]
    return partial(in_turn, [run, partial(mix, layers, order=how.order, pdl=how.pdl)])


def _corrected_after(segments: Sequence[AnySegment], how: SkinnyOptions) -> Run | None:
    """The same of stages whose corrections are of blocks: V x and U z by launches of their own."""
    if how.activation:
        return None if how.order else _gated_after(segments, how)
    found = [(s, s.correction) for s in segments if isinstance(s, QuantizedSegment) and s.correction]
    bare = [replace(s, correction=None) if isinstance(s, QuantizedSegment) else s for s in segments]
    seconds = [Segment(c.first.y, c.u.dense(how.dtype), s.y, part=None) for s, c in found]
    own = replace(how, order=None, ordered=False, add=False)
    runs = [stages([c.first], own) for _, c in found]
    runs.append(stages(bare, how))
    runs += [stages([s], replace(how, gain=None, ordered=False, add=True)) for s in seconds]
    taken = [run for run in runs if run is not None]
    return partial(in_turn, taken) if len(taken) == len(runs) and not how.ordered else None


def _gated_after(segments: Sequence[AnySegment], how: SkinnyOptions) -> Run | None:
    """The same of a pair: rows side by side, then their gated product."""
    from blr.kernels.decode.gemv.gate import gate

    y = segments[1].y
    both = torch.zeros(len(y), 2 * y.shape[1], device=y.device)
    halves = [replace(s, y=part) for s, part in zip(segments, both.chunk(2, 1), strict=True)]
    run = stages(halves, replace(how, activation=""))
    last = partial(gate, both, y, activation=how.activation, pdl=how.pdl)
    return None if run is None else partial(in_turn, [run, last])


def _correctable(s: AnySegment) -> bool:
    """Whether there is no correction, or one whose V is one plain product and whose U one block."""
    if isinstance(s, Segment) or s.correction is None:
        return True
    first, blocks = s.correction.first, s.correction.u.shape[0]
    rows = first.packed if isinstance(first, QuantizedSegment) else first.w
    return first.mix is None and first.bias is None and blocks == 1 == rows.shape[0] == s.packed.shape[0]


def _shared(segments: Sequence[AnySegment]) -> bool:
    x = segments[0].x
    return all(s.x.data_ptr() == x.data_ptr() and s.x.shape == x.shape for s in segments)


def _slices(segments: Sequence[AnySegment]) -> list[int] | None:
    """First columns of inputs that are slices of the same rows at whole groups, with weights that are
    zero where a slice is padded; None if they are not."""
    one = segments[0]
    packed = [s for s in segments if isinstance(s, QuantizedSegment) and s.correction is None]
    if not isinstance(one, QuantizedSegment) or len(packed) < len(segments):
        return None
    if one.bits not in (4, 8) and any(s.K % s.group for s in packed):
        return None
    size = one.x.element_size()
    starts = [(s.x.data_ptr() - one.x.data_ptr()) // size for s in segments]
    storage = {s.x.untyped_storage().data_ptr() for s in segments}
    blocks = all(s.x.shape[1] == width_of(s) for s in segments)
    whole = all(start >= 0 and start % one.group == 0 for start in starts)
    return starts if blocks and whole and len(storage) == 1 else None


def _inputs(segments: Sequence[AnySegment], how: SkinnyOptions) -> tuple[list[Run], list[AnySegment]]:
    """What prepares the inputs of segments, and the segments of those."""
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    one, low, dtype = segments[0], low_of(segments[0]), how.dtype
    if low == 16 and how.gain is None and all(s.x.dtype == dtype for s in segments):
        return [], list(segments)
    if how.ordered:
        return [], [_padded(s) for s in segments]
    group = one.group if isinstance(one, QuantizedSegment) else 0
    options: dict[str, Any] = {"low": low, "group": group, "eps": how.eps, "pdl": how.pdl}
    options["gain"] = how.gain
    if _shared(segments):
        made = prepared(one.x, width_of(one), low, group, dtype)
        v, z, ready = _first_factors(segments, dtype)
        run = partial(prepare, one.x, made, width_of(one), v=v, z=z, **options)
        return [run], [replace(s, x=made) for s in ready]
    if (starts := _slices(segments)) is None:
        each = [_inputs([s], how) for s in segments]
        return [run for runs, _ in each for run in runs], [s for _, ready in each for s in ready]
    ends = [start + width_of(s) for start, s in zip(starts, segments, strict=True)]
    whole = one.x.as_strided((len(one.x), max(ends)), one.x.stride())
    made = prepared(whole, max(ends), low, group, dtype)
    padded = [-(-width_of(s) // group) * group for s in segments]
    cut = [made[:, a : a + n] for a, n in zip(starts, padded, strict=True)]
    run = partial(prepare, whole, made, max(ends), **options)
    return [run], [replace(s, x=x) for s, x in zip(segments, cut, strict=True)]


def _padded(s: AnySegment) -> AnySegment:
    """The segment with what fills the last group of its inputs."""
    assert isinstance(s, QuantizedSegment)
    padded = -(-s.x.shape[1] // s.group) * s.group
    return replace(s, x=s.x.as_strided((len(s.x), padded), s.x.stride()))


def _first_factors(
    segments: Sequence[AnySegment], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, list[AnySegment]]:
    """V of all corrections in one plain matrix, where their results come together, and the segments that
    read those. The factors are small: in plain numbers they cost a few percent of the weights' bytes."""
    corrected = [s for s in segments if isinstance(s, QuantizedSegment) and s.correction is not None]
    if not corrected:
        return None, None, list(segments)
    firsts = [s.correction.first for s in corrected if s.correction is not None]
    rows = [_dense(first, dtype) for first in firsts]
    v, sizes = torch.cat(rows), [len(w) for w in rows]
    z = torch.zeros(len(segments[0].x), len(v), dtype=torch.float32, device=v.device)
    parts = iter(z.split(sizes, 1))
    return v, z, [_reading(s, parts, dtype) for s in segments]


def _dense(first: AnySegment, dtype: torch.dtype) -> Tensor:
    """[r, K] of a first factor."""
    if isinstance(first, Segment):
        return first.w[0].to(dtype)
    return replace(first, x=first.x.float()).dense().w[0].to(dtype)


def _reading(s: AnySegment, parts: Iterator[Tensor], dtype: torch.dtype) -> AnySegment:
    """The segment with its correction, if any, of the next of `parts` and in plain numbers."""
    if isinstance(s, Segment) or s.correction is None:
        return s
    u = Narrow(s.correction.u.dense(dtype).contiguous())
    return replace(s, correction=Correction(replace(s.correction.first, y=next(parts)), u))
