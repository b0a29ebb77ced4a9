"""Launches of stages whose weights may be dense or quantized: `kernels.gemv` or the kernels here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from blr.kernels.gemv.segments import Segment
from blr.kernels.quantized.segments import QuantizedSegment

AnySegment = Segment | QuantizedSegment


def grouped(
    segments: Sequence[AnySegment],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """`segments.grouped` of either kind: one launch for neighbours of one kind and bits."""
    for bits, found in groupby(segments, key=lambda s: getattr(s, "bits", 0)):
        launch: Callable[..., None]
        if bits:
            from blr.kernels.quantized.grouped import grouped as launch
        else:
            from blr.kernels.gemv.grouped import grouped as launch
        launch(list(found), gain=gain, eps=eps, pdl=pdl)


def dual(gate: AnySegment, up: AnySegment, **options: Any) -> None:
    """`segments.dual` of two segments of one kind. Raises ValueError for two of different kinds."""
    bits = {getattr(s, "bits", 0) for s in (gate, up)}
    if len(bits) != 1:
        raise ValueError(f"dual: weights of {sorted(bits)} bits (0: dense); both must be of one kind")
    launch: Callable[..., None]
    if bits == {0}:
        from blr.kernels.gemv.grouped import dual as launch
    else:
        from blr.kernels.quantized.grouped import dual as launch
    launch(gate, up, **options)


def add(s: AnySegment, *, gain: Tensor | None = None, eps: float = 0.0, pdl: bool = False) -> None:
    """The stage of a segment without a mix, added to what its result holds."""
    options: dict[str, Any] = {"bias": s.bias, "part": s.part, "gain": gain, "eps": eps, "pdl": pdl}
    if isinstance(s, Segment):
        from blr.kernels.gemv.launch import gemv

        gemv(s.x, s.w, residual=s.y, out=s.y, **options)
    else:
        from blr.kernels.quantized.launch import gemv_quantized

        gemv_quantized(s.x, s.packed, s.scale, s.bits, s.K, residual=s.y, out=s.y, **options)
