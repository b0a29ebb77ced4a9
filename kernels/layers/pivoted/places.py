"""Where the outputs of two stages belong, and the reference of `gather` in plain torch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from blr.kernels.decode.gemv.reference import ACTIVATIONS


class Places(NamedTuple):
    """at: [o] int32, output k is number ``at[k]`` of what was stored. bias: [o] or None."""

    at: Tensor
    bias: Tensor | None = None

    @property
    def bytes(self) -> int:
        """What one token has to read of it."""
        return self.at.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def into(self, source: Tensor, y: Tensor, *, activation: str = "", add: bool = False) -> None:
        """``y = source[:, at] + bias``, or with `add` that more, in float32, rounded once; with an
        activation ``y = act(gate) ⊙ up`` of both halves.

        Args:
            source: [n, …]. y: [n, o], with an activation [n, o / 2].
        """
        value = source.float().index_select(-1, self.at)
        value = value if self.bias is None else value + self.bias.float()
        if activation:
            gate, up = value.chunk(2, -1)
            value = ACTIVATIONS[activation](gate) * up
        y.copy_(y.float() + value if add else value)
