"""Functions that run the stages of a phase on tensor cores, their inputs prepared before."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from blr.kernels.decode.gemv.launch import side_by_side
from blr.kernels.decode.gemv.segments import (
    PLAIN,
    AnySegment,
    Correction,
    Narrow,
    QuantizedSegment,
    Run,
    Segment,
    in_turn,
)
from blr.kernels.decode.skinny.launch import OnCores, fits, grouped


def stages(segments: Sequence[AnySegment], how: OnCores) -> Run | None:
    """What runs stages; None if these kernels do not take them."""
    parts = [list(part) for _, part in groupby(segments, key=lambda s: s.format)]
    if len(parts) > 1:
        return _all_of([stages(part, how) for part in parts])
    if any(s.mix is not None for s in segments):
        return None if how.add else _mixed(segments, how)
    if not fits(segments, how.dtype):
        return None
    if not all(map(_correctable, segments)):
        return _corrected_after(segments, how)
    before, ready = _inputs(segments, how)
    return partial(in_turn, [*before, partial(grouped, ready, how)])


def _all_of(runs: Sequence[Run | None]) -> Run | None:
    """All in turn; None if one of them is."""
    found = [run for run in runs if run is not None]
    return partial(in_turn, found) if len(found) == len(runs) else None


def _mixed(segments: Sequence[AnySegment], how: OnCores) -> Run | None:
    """The same of BLAST's first factors, whose products are mixed behind them."""
    from blr.kernels.decode.skinny.mix import fits as mixable
    from blr.kernels.decode.skinny.mix import mix

    if not mixable([s.mix for s in segments]):
        return None
    inner = [replace(s, y=torch.zeros(s.y.shape, device=s.y.device), mix=None) for s in segments]
    layers = [(z.y, s.mix, s.y) for z, s in zip(inner, segments, strict=True) if s.mix is not None]
    run = stages(inner, replace(how, order=None))
    return _all_of([run, partial(mix, layers, order=how.order, pdl=how.pdl)])


def _corrected_after(segments: Sequence[AnySegment], how: OnCores) -> Run | None:
    """The same of stages whose corrections are of blocks: V x and U z by launches of their own."""
    if how.activation:
        return None if how.order else _gated_after(segments, how)
    if how.ordered:
        return None
    found = [(s, s.correction) for s in segments if s.correction is not None]
    bare = [s if isinstance(s, Segment) else replace(s, correction=None) for s in segments]
    seconds = [Segment(c.first.y, c.u.dense(how.dtype), s.y) for s, c in found]
    own = replace(how, order=None, add=False)
    runs = [stages([c.first], own) for _, c in found]
    runs.append(stages(bare, how))
    return _all_of([*runs, *(stages([s], replace(how, gain=None, add=True)) for s in seconds)])


def _gated_after(segments: Sequence[AnySegment], how: OnCores) -> Run | None:
    """The same of a pair: rows side by side, then their gated product."""
    halves, last = side_by_side(segments, how)
    return _all_of([stages(halves, replace(how, activation="")), last])


def _correctable(s: AnySegment) -> bool:
    """Whether there is no correction, or one whose V is one plain product and whose U one block."""
    if s.correction is None:
        return True
    first, blocks = s.correction.first, s.correction.u.shape[0]
    return first.mix is None and first.bias is None and blocks == 1 == first.shape[0] == s.shape[0]


def _slices(segments: Sequence[AnySegment]) -> list[int] | None:
    """First columns of inputs that are slices of the same rows at whole groups, with weights that are
    zero where a slice is padded; None if they are not."""
    one = segments[0]
    if one.bits == PLAIN or any(s.correction is not None for s in segments):
        return None
    if one.bits not in (4, 8) and any(s.shape[2] % s.group for s in segments):
        return None
    size = one.x.element_size()
    starts = [(s.x.data_ptr() - one.x.data_ptr()) // size for s in segments]
    storage = {s.x.untyped_storage().data_ptr() for s in segments}
    blocks = all(s.x.shape[1] == s.shape[2] for s in segments)
    whole = all(start >= 0 and start % one.group == 0 for start in starts)
    return starts if blocks and whole and len(storage) == 1 else None


def _inputs(segments: Sequence[AnySegment], how: OnCores) -> tuple[list[Run], list[AnySegment]]:
    """What prepares the inputs of segments, and the segments of those."""
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    one, low, dtype = segments[0], segments[0].low, how.dtype
    x, width, group = one.x, one.shape[2], one.group
    if low == PLAIN and how.gain is None and all(s.x.dtype == dtype for s in segments):
        return [], list(segments)
    if how.ordered:
        return [], [_padded(s) for s in segments]
    ready_by = partial(prepare, low=low, group=group, gain=how.gain, eps=how.eps, pdl=how.pdl)
    if all(s.x.data_ptr() == x.data_ptr() and s.x.shape == x.shape for s in segments):
        made = prepared(x, width, low, group, dtype)
        v, z, ready = _first_factors(segments, dtype)
        run = partial(ready_by, x, made, width, v=v, z=z)
        return [run], [replace(s, x=made) for s in ready]
    if (starts := _slices(segments)) is None:
        each = [_inputs([s], how) for s in segments]
        return [run for runs, _ in each for run in runs], [s for _, ready in each for s in ready]
    end = max(start + s.shape[2] for start, s in zip(starts, segments, strict=True))
    whole = x.as_strided((len(x), end), x.stride())
    made = prepared(whole, end, low, group, dtype)
    padded = [-(-s.shape[2] // group) * group for s in segments]
    cut = [made[:, a : a + n] for a, n in zip(starts, padded, strict=True)]
    run = partial(ready_by, whole, made, end)
    return [run], [replace(s, x=part) for s, part in zip(segments, cut, strict=True)]


def _padded(s: AnySegment) -> AnySegment:
    """The segment with what fills the last group of its inputs."""
    padded = -(-s.x.shape[1] // s.group) * s.group
    return replace(s, x=s.x.as_strided((len(s.x), padded), s.x.stride()))


def _first_factors(
    segments: Sequence[AnySegment], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, list[AnySegment]]:
    """V of all corrections in one plain matrix, where their results come together, and the segments that
    read those. The factors are small: in plain numbers they cost a few percent of the weights' bytes."""
    rows = [_dense(s.correction.first, dtype) for s in segments if s.correction is not None]
    if not rows:
        return None, None, list(segments)
    v, sizes = torch.cat(rows), [len(w) for w in rows]
    z = torch.zeros(len(segments[0].x), len(v), dtype=torch.float32, device=v.device)
    parts = iter(z.split(sizes, 1))
    return v, z, [_reading(s, parts, dtype) for s in segments]


def _dense(first: AnySegment, dtype: torch.dtype) -> Tensor:
    """[r, K] of a first factor."""
    plain = first if isinstance(first, Segment) else replace(first, x=first.x.float()).dense()
    return plain.w[0].to(dtype)


def _reading(s: AnySegment, parts: Iterator[Tensor], dtype: torch.dtype) -> AnySegment:
    """The segment with its correction, if any, of the next of `parts` and in plain numbers."""
    if not isinstance(s, QuantizedSegment) or s.correction is None:
        return s
    u = Narrow(s.correction.u.dense(dtype).contiguous())
    return replace(s, correction=Correction(replace(s.correction.first, y=next(parts)), u))
