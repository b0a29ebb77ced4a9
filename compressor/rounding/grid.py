"""Grids of 2, 3, 4 and 8 bits, and the nearest points of them.

A group of weights has one scale; a weight is ``scale × level``. The levels of 2 and 3 bits lie on
either side of zero, none on it: four or eight values with a zero among them waste one of them on
weights that are small anyway (squared error 15% higher for Gaussian weights). Those of 3 bits widen
outwards as the least squares quantizer of a Gaussian does (Max, "Quantizing for minimum
distortion", 1960): ``x (1 + x²/50)``, which a kernel computes from the code.
"""

from __future__ import annotations

import torch
from torch import Tensor

CURVE = {3: 0.02}  # level = x (1 + CURVE x²)
SEARCHED = torch.linspace(0.3, 1.15, 35).tolist()  # scales tried, as shares of the one that reaches all


def levels(bits: int, device: torch.device | str = "cpu") -> Tensor:
    """The values of codes 0, 1, … for a scale of 1, rising, float32: 2^bits, or −127 … 127 of 8 bits."""
    if bits == 8:
        return torch.arange(-127.0, 128.0, device=device)
    codes = torch.arange(2.0**bits, device=device)
    if bits == 4:
        return codes - 8
    x = codes - (2**bits - 1) / 2
    return x * (1 + CURVE.get(bits, 0.0) * x.square())


def top(bits: int) -> float:
    """The largest magnitude among the levels."""
    return float(levels(bits).abs().max())


def nearest(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The level nearest to ``w / scale``, unit scale, in the dtype of `w`; 0 where the scale is 0.

    Args:
        w: any shape. scale: broadcasts against it; of 4 bits it may be negative.
    """
    unit = torch.where(scale == 0, 0.0, w / scale)
    if bits in CURVE:
        table = levels(bits, w.device).to(w.dtype)
        return table[torch.bucketize(unit, (table[1:] + table[:-1]) / 2)] * (scale != 0)
    if bits == 8:
        return unit.round().clamp(-127, 127)
    if bits == 4:
        return unit.round().clamp(-8, 7)
    most = (2**bits - 1) / 2
    return ((unit - 0.5).round() + 0.5).clamp(-most, most) * (scale != 0)


def best_scale(
    w: Tensor, bits: int, importance: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The scale of every group with the least squared error, among those of `SEARCHED`.

    Args:
        w: groups [..., G], float32 or float64. importance: weights of the squares, [G] or as `w`.
        dtype: what scales are rounded to before they are judged (default that of `w`).

    Returns:
        [..., 1] in the dtype of `w`.
    """
    largest = w.gather(-1, w.abs().argmax(-1, keepdim=True))  # signed: 4 bits have one level more below
    if bits == 8:
        return _rounded(largest.abs() / 127, dtype)
    unit = -largest / 8 if bits == 4 else largest.abs() / top(bits)
    best = torch.full_like(unit, torch.inf)
    scale = unit
    for ratio in SEARCHED:
        tried = _rounded(unit * ratio, dtype)
        square = (nearest(w, tried, bits) * tried - w).square()
        error = (square if importance is None else square * importance).sum(-1, keepdim=True)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    return scale


def _rounded(scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    return scale if dtype is None else scale.to(dtype).to(scale.dtype)
