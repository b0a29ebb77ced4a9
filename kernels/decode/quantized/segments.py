"""What one launch of several stages with quantized weights is made of, and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.decode.gemv.segments import ACTIVATIONS, Segment
from blr.kernels.decode.quantized.formats import GROUP


class Narrow(NamedTuple):
    """U of a correction as kernels read it: rows of levels as bytes, or of plain numbers.

    levels: [B, q, r], int8, or floating-point numbers. scale: [B, q, ⌈r / group⌉] of levels, else None.
    """

    levels: Tensor
    scale: Tensor | None = None
    group: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, q, r]."""
        return tuple(self.levels.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.levels.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[B, q, r]: levels times scales in float32 or better, rounded once."""
        if self.scale is None:
            return self.levels.to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = self.scale.to(wide).repeat_interleave(self.group, -1)[..., : self.shape[2]]
        return (self.levels.to(wide) * scale).to(dtype)


@dataclass(frozen=True)
class Correction:
    """``U z`` for a segment with the same input: z, the result of `first`, is made before or in the same
    launch.

    first: a stage into z [n, B·r] in float32. u: [B, q, r], B·q being the segment's outputs.
    """

    first: Segment | QuantizedSegment
    u: Narrow

    def of_tokens(self, some: slice) -> Correction:
        """Of some of the tokens."""
        return Correction(self.first.of_tokens(some), self.u)

    def product(self, dtype: torch.dtype) -> Tensor:
        """[n, B·q] of the z that is there."""
        blocks, _, ranks = self.u.shape
        z = self.first.y.to(dtype).unflatten(-1, (blocks, ranks))
        return torch.einsum("bqr,nbr->nbq", self.u.dense(dtype), z).flatten(1)


@dataclass(frozen=True)
class QuantizedSegment:
    """`blr.kernels.decode.gemv.segments.Segment` with weights [B, R, K] packed.

    packed: [B, R, bytes]. scale: [B, R, groups]. bits, group, curved: of the format. x, y, bias, mix,
    part: as there. correction: what else the result is the sum of.
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
    group: int = GROUP
    correction: Correction | None = None
    curved: bool = True

    def of_tokens(self, some: slice) -> QuantizedSegment:
        """Of some of the tokens."""
        more = None if self.correction is None else self.correction.of_tokens(some)
        return replace(self, x=self.x[some], y=self.y[some], correction=more)

    def dense(self) -> Segment:
        """The same with its weights dequantized to the dtype of `x`, without the correction."""
        from blr.kernels.decode.quantized.reference import dequantize

        form = self.bits, self.K, self.x.dtype, self.group, self.curved
        w = dequantize(self.packed, self.scale, *form)
        return Segment(self.x, w, self.y, self.bias, self.mix, self.part)

    def product(self, gain: Tensor | None, eps: float) -> Tensor:
        """[n, B·R] in the dtype of `x`; z is made on the way."""
        y = self.dense().product(gain, eps)
        if self.correction is None:
            return y
        first = self.correction.first
        first.y.copy_(first.product(gain, eps))
        return y + self.correction.product(y.dtype)


class QuantizedStage(NamedTuple):
    """What kernels take of a `QuantizedSegment`, as `blr.kernels.decode.gemv.segments.Stage`; w and its
    strides count words of 4 bytes, w_row units of them. z, u…: of a correction."""

    x: Tensor
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    scale: object
    scale_block: int
    scale_row: int
    mix: object
    mix_out: int
    mix_in: int
    mix_rank: int
    bias: Tensor
    y: Tensor
    rows: int
    K: int
    blocks: int
    part: int
    z: Tensor
    u: object
    u_row: int
    u_scale: object
    u_scale_row: int
    u_part: int
    ranks: int


class QuantizedTile(NamedTuple):
    """What the code for a stage is specialized by: the `formats.Form` of its weights, rows BR and quads
    BQ of a program's tile, its rows T that lie side by side, whether a row has ONE chunk, by what UNIT
    of words rows are counted; NORM, BIAS and MIX as of `blr.kernels.decode.gemv.segments.Tile`; the
    power of two RANKS of a correction or 0, U_GROUP of its levels or 0; products of BYTES: 0 in float32,
    1 by the GPU's instruction for four, 2 by what that computes. FULL: the tile has no row, quad or
    column that is not there."""

    BITS: int
    GROUP: int
    FIELDS: int
    WORDS: int
    STEP: int
    COLUMNS: int
    CURVED: bool
    BR: int
    BQ: int
    T: int
    ONE: bool
    UNIT: int = 4
    NORM: int = 0
    BIAS: bool = False
    MIX: int = 0
    RANKS: int = 0
    U_GROUP: int = 0
    BYTES: int = 0
    FULL: bool = False


def grouped(
    segments: Sequence[Segment | QuantizedSegment], *, gain: Tensor | None = None, eps: float = 0.0
) -> None:
    """Every segment's stage; with `gain` [K], of its input after an RMS norm (inputs K wide)."""
    for segment in segments:
        segment.y.copy_(segment.product(gain, eps))


def dual(
    gate: Segment | QuantizedSegment,
    up: Segment | QuantizedSegment,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """``up.y = act(gate) ⊙ up``: two stages with the same B and R in the plain order."""
    up.y.copy_(ACTIVATIONS[activation](gate.product(gain, eps)) * up.product(gain, eps))
