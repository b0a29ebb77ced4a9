"""What one launch of several decoding stages is made of, and its reference in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = Callable[[], object]
SEVERAL = 2  # rows from which tensor cores multiply (`kernels/decode/skinny`)
ACTIVATIONS = {
    "": lambda y: y,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "relu": torch.relu,
}


@dataclass(frozen=True)
class Segment:
    """One stage inside a launch: ``y = W x + bias`` in blocks, as `reference.gemv`.

    x: [n, …] view of its input: all blocks share it when it is K wide. w: [B, R, K]. y: [n, B·R]
    view that takes the result. bias: [B·R]. part: rows that stay together.
    mix: [B, B, R], the S of BLAST: ``y[k, r] = Σ_l mix[k, l, r] (w[l, r, :] · x_l)``; then there is
    neither bias nor part, and a norm is over all of the input.
    """

    x: Tensor
    w: Tensor
    y: Tensor
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None

    def of_tokens(self, some: slice) -> Segment:
        """Of some of the tokens."""
        return replace(self, x=self.x[some], y=self.y[some])

    def product(self, gain: Tensor | None, eps: float) -> Tensor:
        """[n, B·R] in the dtype of `x`."""
        from blr.kernels.decode.gemv.reference import gemv

        tensors = (self.bias, self.mix, gain)
        bias, mix, gain = (None if t is None else t.to(self.x.dtype) for t in tensors)
        y = gemv(self.x, self.w.to(self.x.dtype), bias=bias, gain=gain, eps=eps, part=self.part)
        if mix is None:
            return y
        return torch.einsum("klr,nlr->nkr", mix, y.unflatten(-1, mix.shape[1:])).flatten(1)


class Stage(NamedTuple):
    """What kernels take of a `Segment`: pointers, strides and sizes, all in elements.

    x_token, y_token: from a token to the next one. x_block: from the input of a block to the next one's,
    0 where all share it. Any pointer stands for
    an absent tensor: it is never read.
    """

    x: Tensor
    x_token: int
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    w_col: int
    mix: object
    mix_out: int
    mix_in: int
    mix_rank: int
    bias: Tensor
    y: Tensor
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int


class Tile(NamedTuple):
    """What the code for a stage is specialized by: rows BR and columns BK of a program's tile,
    `launch.norm_kind`, whether there is a bias, the power of two of blocks that it mixes or 0, and the
    tokens of the launch."""

    BR: int
    BK: int
    NORM: int = 0
    BIAS: bool = False
    MIX: int = 0
    TOKENS: int = 1


def dual_fits(gate: Any, up: Any) -> bool:
    """Whether stages of weights `gate` and `up`, [B, R, K] each, plain or packed, fit one `dual`."""
    return gate.shape[:2] == up.shape[:2]


def shared_input(x: Tensor, w: Tensor) -> bool:
    """Whether all blocks of `w` [B, R, K] take the whole of `x`."""
    return x.shape[1] == w.shape[2]


def in_turn(runs: Sequence[Run]) -> None:
    """Call `runs` one after the other."""
    for run in runs:
        run()
