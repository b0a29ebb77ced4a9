"""Stages of one launch, with plain or packed weights, and their reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from blr.kernels.decode.quantized.formats import GROUP, PLANES, grid_of

Run = Callable[[], object]
SEVERAL = 2  # rows from which tensor cores multiply (`kernels/decode/skinny`)
PLAIN = 16  # the bits of plain weights
ACTIVATIONS = {
    "": lambda y: y,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "relu": torch.relu,
}


@dataclass(frozen=True)
class Segment:
    """One stage inside a launch: ``y = W x + bias`` in B blocks of R rows and K columns.

    x: [n, B·K]: block g takes columns g·K…; or [n, K], which all take. w: [B, R, K]. y: [n, B·R] view
    that takes the result. bias: [B·R].
    part: rows of a block that stay together: output ``(row // part, block, row % part)``; Monarch's
    first stage has part = r'. None: R, the plain order.
    mix: [B, B, R], the S of BLAST: ``y[k, r] = Σ_l mix[k, l, r] (w[l, r, :] · x_l)``; then there is
    neither bias nor part, and a norm is over all of the input.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None
    bits: ClassVar[int] = PLAIN
    group: ClassVar[int] = 0
    low: ClassVar[int] = PLAIN
    correction: ClassVar[None] = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, R and K."""
        blocks, rows, width = self.w.shape
        return blocks, rows, width

    @property
    def format(self) -> tuple[int, int, bool]:
        """Bits and group of the weights, 16 and 0 of plain ones, and whether the grid is curved."""
        return PLAIN, 0, False

    def of_tokens(self, some: slice) -> Segment:
        """Of some of the tokens."""
        return replace(self, x=self.x[some], y=self.y[some])

    def product(self, gain: Tensor | None, eps: float) -> Tensor:
        """[n, B·R] in the dtype of `x`; with `gain`, of x over its root mean square, times that."""
        x, (_, rows, width) = self.x, self.shape
        if gain is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)
        blocks = x.unflatten(-1, (-1, width))  # [n, B, K], or [n, 1, K]
        y = torch.einsum("grk,ngk->ngr", self.w.to(x.dtype), blocks)
        if self.mix is not None:
            return torch.einsum("klr,nlr->nkr", self.mix.to(x.dtype), y).flatten(1)
        y = y.unflatten(-1, (-1, self.part or rows)).transpose(1, 2).flatten(1)
        return y if self.bias is None else y + self.bias.to(x.dtype)


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
    """A `Segment` with its weights packed (`kernels/decode/quantized`).

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

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, R and K."""
        blocks, rows, _ = self.packed.shape
        return blocks, rows, self.K

    @property
    def low(self) -> int:
        """Bits of the lowest plane of the weights."""
        return PLANES[self.bits][0]

    @property
    def format(self) -> tuple[int, int, bool]:
        """As of `Segment`."""
        return self.bits, self.group, grid_of(self.bits, self.curved).curve != 0

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


AnySegment = Segment | QuantizedSegment


@dataclass(frozen=True)
class How:
    """How the stages of a launch run. gain, eps: of the RMS norm of their inputs. add: to what the
    results hold. activation: of a pair of as many rows, as of `dual`. pdl: see `launch_options`."""

    gain: Tensor | None = None
    eps: float = 0.0
    add: bool = False
    activation: str = ""
    pdl: bool = False


USUAL = How()


def grouped(segments: Sequence[AnySegment], *, gain: Tensor | None = None, eps: float = 0.0) -> None:
    """Every segment's stage; with `gain` [K], of its input after an RMS norm (inputs K wide)."""
    for segment in segments:
        segment.y.copy_(segment.product(gain, eps))


def dual(
    gate: AnySegment, up: AnySegment, *, activation: str, gain: Tensor | None = None, eps: float = 0.0
) -> None:
    """``up.y = act(gate) ⊙ up``: two stages with the same B and R in the plain order."""
    up.y.copy_(ACTIVATIONS[activation](gate.product(gain, eps)) * up.product(gain, eps))


def in_turn(runs: Sequence[Run]) -> None:
    """Call `runs` one after the other."""
    for run in runs:
        run()
