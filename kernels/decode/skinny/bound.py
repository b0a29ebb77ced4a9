"""Functions that run the stages of a phase by skinny products, their inputs prepared before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr.kernels.decode.gemv.segments import PACKED_FROM, PLAIN_FROM, Segment
from blr.kernels.decode.quantized.segments import Correction, Narrow, QuantizedSegment
from blr.kernels.decode.skinny.launch import (
    AnySegment,
    Order,
    Workspace,
    dual,
    fits,
    grouped,
    low_of,
    rows_of,
    width_of,
)

Run = Callable[[], Any]
WIDE = 1 << 25  # weights of a launch in four bits from which two rows are faster here, too


def stages(
    segments: Sequence[AnySegment],
    workspace: Workspace,
    dtype: torch.dtype,
    *,
    add: bool,
    order: Order = None,
    ordered: bool = False,
    **options: Any,
) -> Run | None:
    """What runs stages, each stored or added to its result; None if these kernels do not take them.

    dtype: of the model. order: as of `launch.grouped`. ordered: whether inputs are there in the order of
    these weights. options: gain, eps and pdl, as of `grouped` of the quantized kernels.
    """
    if any(s.mix is not None for s in segments):
        more: dict[str, Any] = {**options, "order": order, "ordered": ordered}
        return None if add else _mixed(segments, workspace, dtype, **more)
    if not _taken(segments, dtype, ordered):
        return None
    before, ready = _inputs(segments, dtype, ordered, **options)
    run = partial(grouped, ready, workspace, add=add, order=order, pdl=options["pdl"])
    return _in_turn(*before, run)


def _mixed(
    segments: Sequence[AnySegment],
    workspace: Workspace,
    dtype: torch.dtype,
    *,
    order: Order,
    **options: Any,
) -> Run | None:
    """The same of BLAST's first factors, whose products are mixed behind them; none is added."""
    from blr.kernels.decode.skinny.mix import fits as mixable
    from blr.kernels.decode.skinny.mix import mix

    if not mixable([s.mix for s in segments]):
        return None
    inner = [replace(s, y=torch.zeros(s.y.shape, device=s.y.device), mix=None) for s in segments]
    if (run := stages(inner, workspace, dtype, add=False, **options)) is None:
        return None
    layers = [(z.y, s.mix, s.y) for z, s in zip(inner, segments, strict=True) if s.mix is not None]
    return _in_turn(run, partial(mix, layers, order=order, pdl=options["pdl"]))


def pair(
    gate: AnySegment, up: AnySegment, workspace: Workspace, dtype: torch.dtype, *, activation: str,
    order: Order = None,
    ordered: bool = False,
    **options: Any,
) -> Run | None:  # fmt: skip
    """The same of ``act(gate) ⊙ up``."""
    if not _taken((gate, up), dtype, ordered):
        return None
    before, (first, second) = _inputs((gate, up), dtype, ordered, **options)
    shared: dict[str, Any] = {"order": order, "pdl": options["pdl"]}
    run = partial(dual, first, second, workspace, activation=activation, **shared)
    return _in_turn(*before, run)


def _taken(segments: Sequence[AnySegment], dtype: torch.dtype, ordered: bool) -> bool:
    if len(segments[0].x) < (PACKED_FROM if _few(segments) else PLAIN_FROM):
        return False
    fitting = fits(segments, dtype) and all(map(_correctable, segments))
    assert fitting or not ordered, "inputs in an order that nothing reads"
    return fitting and (ordered or _inputs_fit(segments, dtype))


def _few(segments: Sequence[AnySegment]) -> bool:
    """Whether CUDA cores multiply two rows faster: with less than `WIDE` weights of four bits."""
    four = all(isinstance(s, QuantizedSegment) and s.bits == 4 for s in segments)
    return four and sum(rows_of(s) * width_of(s) for s in segments) < WIDE


def _correctable(s: AnySegment) -> bool:
    """Whether there is no correction, or one whose V is one plain product and whose U one block."""
    if isinstance(s, Segment) or s.correction is None:
        return True
    first, blocks = s.correction.first, s.correction.u.shape[0]
    rows = first.packed if isinstance(first, QuantizedSegment) else first.w
    return first.mix is None and first.bias is None and blocks == 1 == rows.shape[0] == s.packed.shape[0]


def _inputs_fit(segments: Sequence[AnySegment], dtype: torch.dtype) -> bool:
    if _shared(segments):
        return True
    if isinstance(segments[0], Segment):
        return all(s.x.dtype == dtype for s in segments)
    return _slices(segments) is not None


def _shared(segments: Sequence[AnySegment]) -> bool:
    x = segments[0].x
    return all(s.x.data_ptr() == x.data_ptr() and s.x.shape == x.shape for s in segments)


def _slices(segments: Sequence[AnySegment]) -> list[int] | None:
    """First columns of inputs that are slices of the same rows at whole groups, with weights that are
    zero where a slice is padded; None if they are not."""
    one = segments[0]
    packed = [s for s in segments if isinstance(s, QuantizedSegment) and s.correction is None]
    if not isinstance(one, QuantizedSegment) or one.bits != 4 or len(packed) < len(segments):
        return None
    size = one.x.element_size()
    starts = [(s.x.data_ptr() - one.x.data_ptr()) // size for s in segments]
    storage = {s.x.untyped_storage().data_ptr() for s in segments}
    blocks = all(s.x.shape[1] == width_of(s) for s in segments)
    whole = all(start >= 0 and start % one.group == 0 for start in starts)
    return starts if blocks and whole and len(storage) == 1 else None


def _inputs(
    segments: Sequence[AnySegment],
    dtype: torch.dtype,
    ordered: bool,
    *,
    gain: Tensor | None,
    eps: float,
    pdl: bool,
) -> tuple[list[Run], list[Any]]:
    """What prepares the inputs of segments, and the segments of those."""
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    one, low = segments[0], low_of(segments[0])
    if low == 16 and gain is None and one.x.dtype == dtype:
        return [], list(segments)
    if ordered:
        return [], [_padded(s) for s in segments]
    group = one.group if isinstance(one, QuantizedSegment) else 0
    options: dict[str, Any] = {"low": low, "group": group, "gain": gain, "eps": eps, "pdl": pdl}
    if _shared(segments):
        made = prepared(one.x, width_of(one), low, group, dtype)
        v, z, ready = _first_factors(segments, dtype)
        run = partial(prepare, one.x, made, width_of(one), v=v, z=z, **options)
        return [run], [replace(s, x=made) for s in ready]
    starts = _slices(segments)
    assert starts is not None
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
) -> tuple[Tensor | None, Tensor | None, list[Any]]:
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


def _in_turn(*runs: Run) -> Run:
    return runs[0] if len(runs) == 1 else lambda: [run() for run in runs]
