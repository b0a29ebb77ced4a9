"""What one launch of several stages with quantized weights is made of, and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from blr.kernels.gemv.segments import Segment
from blr.kernels.gemv.segments import dual as dense_dual
from blr.kernels.gemv.segments import grouped as dense_grouped
from blr.kernels.quantized.reference import dequantize


@dataclass(frozen=True)
class QuantizedSegment:
    """`blr.kernels.gemv.segments.Segment` with weights [B, R, K] packed.

    packed: [B, R, bytes]. scale: [B, R, groups]. bits: 4 or 8. x, y, bias, mix, part: as there.
    """

    x: Tensor
    packed: Tensor
    scale: Tensor
    bits: int
    K: int
    y: Tensor
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None

    def dense(self) -> Segment:
        """The same with its weights dequantized to the dtype of `x`."""
        w = dequantize(self.packed, self.scale, self.bits, self.K, self.x.dtype)
        return Segment(self.x, w, self.y, self.bias, self.mix, self.part)

    def product(self, gain: Tensor | None, eps: float) -> Tensor:
        """[n, B·R] in the dtype of `x`."""
        return self.dense().product(gain, eps)


class QuantizedStage(NamedTuple):
    """What kernels take of a `QuantizedSegment`, as `blr.kernels.gemv.segments.Stage`; w and its
    strides count words of 4 bytes."""

    x: Any
    x_token: int
    x_block: int
    w: Any
    w_block: int
    w_row: int
    scale: Any
    scale_block: int
    scale_row: int
    mix: Any
    mix_out: int
    mix_in: int
    mix_rank: int
    bias: Any
    y: Any
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int


class QuantizedTile(NamedTuple):
    """What the code for a stage is specialized by: BITS of a weight, rows BR and quads BQ of a
    program's tile, its rows T that lie side by side, whether a row has ONE chunk; NORM, BIAS and MIX
    as of `blr.kernels.gemv.segments.Tile`."""

    BITS: int
    BR: int
    BQ: int
    T: int
    ONE: bool
    NORM: int = 0
    BIAS: bool = False
    MIX: int = 0


def grouped(
    segments: Sequence[Segment | QuantizedSegment], *, gain: Tensor | None = None, eps: float = 0.0
) -> None:
    """Every segment's stage; with `gain` [K], of its input after an RMS norm (inputs K wide)."""
    dense_grouped([_dense(segment) for segment in segments], gain=gain, eps=eps)


def dual(
    gate: Segment | QuantizedSegment,
    up: Segment | QuantizedSegment,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """``up.y = act(gate) ⊙ up``: two stages with the same B and R in the plain order."""
    dense_dual(_dense(gate), _dense(up), activation=activation, gain=gain, eps=eps)


def _dense(segment: Segment | QuantizedSegment) -> Segment:
    return segment if isinstance(segment, Segment) else segment.dense()
