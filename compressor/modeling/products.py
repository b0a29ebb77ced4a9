"""Products of layers with their factors as they were, whole or some of their outputs. Shipped inside
every checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.fused.activated.launch import activated
from blr.kernels.layers.lowrank.op import lowrank_linear
from blr.kernels.layers.lowrank.reference import grouped_lowrank_linear

MANY = 128  # tokens of a sequence from which a product through ranks is two of the library's


class Product:
    """``function(x, *factors)``; outputs are selected from all of them."""

    def __init__(self, function: Callable[..., Tensor], *factors: Any) -> None:
        self.function, self.factors = function, factors

    def __call__(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        return self.function(x, *self.factors)

    def activated(self, x: Tensor, activation: str) -> Tensor | None:
        """The output behind an activation of `kernels.fused.activated`, where that is made with it: of
        two products; else None, and nothing is done."""
        return None

    def inner(self, x: Tensor) -> Tensor:
        """What all parts of the output are made from: here the output."""
        return self(x)

    def outer(self, inner: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start…stop [..., stop - start]."""
        return inner[..., start:stop]

    def window(self, start: int, stop: int) -> tuple[Product, bool]:
        """A product of outputs start…stop, if there is one with fewer ranks, else this one; whether
        there is."""
        return self, False


class LowRankProduct(Product):
    """``(x V) Uᵀ + bias``, whole or in groups: some outputs are some rows of U."""

    def __init__(self, U: Tensor, V: Tensor, bias: Tensor | None, side: str | None) -> None:
        super().__init__(lowrank_linear, U, V, bias)
        self.U, self.V, self.bias, self.side = U, V, bias, side or "out"

    def __call__(self, x: Tensor) -> Tensor:
        if self.U.dim() == 3:
            return grouped_lowrank_linear(x, self.U, self.V, self.bias, side=self.side)
        if x.shape[-2] >= MANY:  # a chunk: what the operator would choose, without asking it
            return linear(x @ self.V, self.U, self.bias)
        return lowrank_linear(x, self.U, self.V, self.bias)

    def activated(self, x: Tensor, activation: str) -> Tensor | None:
        if self.U.dim() == 3 or x.shape[-2] < MANY:
            return None
        return activated(x @ self.V, self.U, self.bias, activation)

    def inner(self, x: Tensor) -> Tensor:
        """[..., r] or, in groups of outputs, [..., G, r]."""
        if self.U.dim() == 2:
            return x @ self.V
        if self.side == "in":
            return self(x)
        ranks = linear(x, self.V.mT.flatten(0, 1))
        return ranks.unflatten(-1, (self.U.shape[0], self.U.shape[2]))

    def window(self, start: int, stop: int) -> tuple[Product, bool]:
        """Some of the groups of outputs."""
        if self.U.dim() == 2 or self.side == "in":
            return self, False
        width = self.U.shape[1]
        if start % width or stop % width:
            return self, False
        groups = slice(start // width, stop // width)
        bias = None if self.bias is None else self.bias[start:stop]
        return LowRankProduct(self.U[groups], self.V[groups], bias, self.side), True

    def of_heads(self, ranks: Tensor) -> Tensor:
        """[B, H, T, D] of ranks [B, H, T, r], where groups are heads, or each serves H/G in a row."""
        times = ranks.shape[1] // self.U.shape[0]
        y = ranks @ self.U.repeat_interleave(times, 0).mT
        if self.bias is None:
            return y
        return y + self.bias.view(-1, 1, self.U.shape[1]).repeat_interleave(times, 0)

    def outer(self, inner: Tensor, start: int, stop: int) -> Tensor:
        """Outputs start…stop by their rows of U."""
        bias = None if self.bias is None else self.bias[start:stop]
        if self.U.dim() == 2:
            return linear(inner, self.U[start:stop], bias)
        if self.side == "in":
            return inner[..., start:stop]
        width = self.U.shape[1]
        first, last = start // width, -(-stop // width)
        ranks = inner[..., first:last, :]
        y = (ranks.movedim(-2, 0).flatten(1, -2) @ self.U[first:last].mT).movedim(0, -2).flatten(-2)
        y = y.unflatten(0, ranks.shape[:-2])[..., start - first * width : stop - first * width]
        return y if bias is None else y + bias
