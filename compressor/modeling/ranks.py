"""Computes low-rank layers in two steps: from an input to its ranks, and from ranks to outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

if TYPE_CHECKING:
    from blr.compressor.modeling.layers import StructuredLinear


class RankRequest(NamedTuple):
    """An input x for which a low-rank layer, called with this, answers as `in_ranks`. The layer itself
    is called because whoever keeps its weights elsewhere (offloading) brings them in for a call."""

    x: Tensor


class OfRanks(NamedTuple):
    """The second step, ``ranks Uᵀ + bias``. In groups U is [G, o/G, r]; outputs lie group by group."""

    U: Tensor
    bias: Tensor | None

    def outputs(self, ranks: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start…stop [..., stop - start] of ranks [..., r] or, in groups, [..., G, r]."""
        bias = None if self.bias is None else self.bias[start:stop]
        if self.U.dim() == 2:
            return linear(ranks, self.U[start:stop], bias)
        width = self.U.shape[1]
        first, last = start // width, -(-stop // width)
        held = ranks[..., first:last, :]
        y = (held.movedim(-2, 0).flatten(1, -2) @ self.U[first:last].mT).movedim(0, -2).flatten(-2)
        y = y.unflatten(0, held.shape[:-2])[..., start - first * width : stop - first * width]
        return y if bias is None else y + bias

    def part(self, start: int, stop: int) -> tuple[OfRanks, slice] | None:
        """The product of only those groups that make outputs start…stop, and which; or None."""
        if self.U.dim() == 2 or start % self.U.shape[1] or stop % self.U.shape[1]:
            return None
        groups = slice(start // self.U.shape[1], stop // self.U.shape[1])
        bias = None if self.bias is None else self.bias[start:stop]
        return OfRanks(self.U[groups], bias), groups


def in_ranks(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None) -> tuple[Tensor, OfRanks]:
    """``x V`` [..., r] or, in groups of outputs, [..., G, r], and the step that follows."""
    if U.dim() == 2:
        return x @ V, OfRanks(U, bias)
    return linear(x, V.mT.flatten(0, 1)).unflatten(-1, (U.shape[0], U.shape[2])), OfRanks(U, bias)


def ranked(module: nn.Module, *names: str) -> list[StructuredLinear]:
    """The children of these names if all answer a `RankRequest`, else none; adapters do not."""
    found: list[Any] = [module._modules.get(name) for name in names]
    return found if all(getattr(layer, "has_ranks", False) for layer in found) else []
