"""Segments of random weights for the skinny products, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blr.kernels.decode.gemv.segments import QuantizedSegment, Segment
from blr.kernels.decode.quantized.reference import quantize

EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def made(
    kind: str, x: Tensor, rows: int, K: int, *, blocks: int = 1, dtype: Any = torch.float16, **more: Any
) -> Any:
    """A segment of random weights: "16", or bits and group as "4/128", and "3/64/uniform"."""
    y = torch.full((len(x), blocks * rows), float("nan"), device=x.device)
    w = drawn(blocks, rows, K, dtype=dtype, device=x.device.type) / K**0.5
    if kind == "16":
        return Segment(x, w, y, **more)
    (bits, group), grid = map(int, kind.split("/")[:2]), kind.split("/")[2:]
    packed, scale = quantize(w, bits, dtype, group=group, curved=not grid)
    return QuantizedSegment(x, packed, scale, bits, K, y, group=group, curved=not grid, **more)


def ready(segments: list[Any], gain: Tensor | None = None, dtype: Any = torch.float16) -> list[Any]:
    """The segments of inputs that are prepared."""
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    one = segments[0]
    how = {"low": one.low, "group": one.group}
    out = prepared(one.x, one.shape[2], *how.values(), dtype).fill_(float("nan"))
    prepare(one.x, out, one.shape[2], **how, gain=gain, eps=EPS)
    return [replace(s, x=out) for s in segments]


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def close(found: Tensor, expected: Tensor, limit: float = 3e-3) -> None:
    error = distance(found, expected)
    assert error < limit, error
