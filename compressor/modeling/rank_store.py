"""The ranks of keys or values that a cache holds, and the nodes made of them. Shipped inside every
checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blr.compressor.modeling.expressions import (
    Heads,
    Like,
    Memo,
    Narrow,
    Node,
    Permuted,
    Region,
    Replayed,
    Source,
    mapped,
)
from blr.compressor.modeling.rank_formats import FORMATS

# a tensor of new tokens, their dimension and that of sequences (None: it has none), to all tokens'
Extend = Callable[[Tensor, int, int | None], Tensor]


class RankStore:
    """Ranks [B, T, …, r] of all tokens so far, in one of `FORMATS`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.format = kind, FORMATS[kind]
        self.held: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        """T."""
        return self.held[0].shape[1] if self.held else 0

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return sum(tensor.nbytes for tensor in self.held)

    def append(self, ranks: Tensor) -> None:
        """Ranks [B, t, …, r] of new tokens."""
        new = self.format.pack(ranks)
        pairs = zip(self.held, new, strict=True)
        self.held = tuple(torch.cat(pair, 1) for pair in pairs) if self.held else new

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put ``function`` of what is held, whose first dimensions are B and T, in its place."""
        self.held = tuple(function(tensor) for tensor in self.held)


class Held(Node):
    """Outputs [B, T, o] of a layer, whose ranks are stored; `product` as of `StructuredLinear.bound`."""

    def __init__(self, store: RankStore, product: Any, outputs: int, dtype: torch.dtype) -> None:
        self.ranks, self.unpack, self.product = store.held, store.format.unpack, product
        super().__init__((*store.held[0].shape[:2], outputs), dtype, (0, 1, "o"), ())

    @property
    def device(self) -> torch.device:
        """That of the ranks."""
        return self.ranks[0].device

    def inner(self, region: Region) -> Tensor:
        """Ranks of the sequences and tokens of a region."""
        parts = self.ranks
        for dim in (0, 1):
            if dim in region:
                start, stop = region[dim]
                parts = tuple(part.narrow(dim, start, stop - start) for part in parts)
        return self.unpack(parts, self.dtype)

    def _part(self, region: Region, memo: Memo) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.inner(region)
        result: Tensor = self.product.outer(memo[id(self)], *region.get("o", (0, self.shape[-1])))
        return result


def of_one_layer(node: Node) -> Source | None:
    """The one layer's output that a key or value is made from, by functions that `again` knows."""
    known = isinstance(node, Source | Narrow | Heads | Permuted | Replayed)
    if not known or node.value is not None or len(node.sources) != 1:
        return None
    if any(of_one_layer(part) is None for part in node.of):
        return None
    return next(iter(node.sources))


def features_of(node: Node) -> tuple[int, int]:
    """Which outputs of its one layer a node is made from."""
    while node.of:
        if isinstance(node, Narrow) and isinstance(node.of[0], Source):
            return node.start, node.start + node.shape[-1]
        node = node.of[0]
    return 0, node.shape[-1]


def renewed(node: Node, store: RankStore, tables: Sequence[Tensor]) -> Node:
    """A node of `again` over what `store` and the tables, in their order, hold now."""
    leaf, left = node, iter(tables)
    while not isinstance(leaf, Held):
        leaf = leaf.of[0]
    now = Held(store, leaf.product, leaf.shape[-1], leaf.dtype)
    return again(node, now, lambda *_: next(left))


def again(node: Node, leaf: Node, extend: Extend) -> Node:
    """`node` with `leaf`, of more tokens, in the place of its source; what several nodes are made from
    is made once, as in `node`: rotations read it twice, norms three times, one behind the other."""
    made: dict[Node, Node] = {}

    def more(part: Node) -> Node:
        if part not in made:
            made[part] = _again(part, leaf, more, extend)
        return made[part]

    return more(node)


def _again(node: Node, leaf: Node, more: Callable[[Node], Node], extend: Extend) -> Node:
    """One node of `again`, made of what `more` makes of those that it is made from."""
    if isinstance(node, Source | Held):
        return leaf
    if isinstance(node, Narrow) and isinstance(node.of[0], Source) and leaf.shape[-1] == node.shape[-1]:
        return leaf  # it has no other features
    if isinstance(node, Replayed):
        return _replayed(node, leaf, more, extend)
    first = more(node.of[0])
    if isinstance(node, Narrow):
        return Narrow(first, node.start, node.start + node.shape[-1])
    if isinstance(node, Heads):
        return Heads(first, node.shape[-2], node.shape[-1])
    assert isinstance(node, Permuted)
    return Permuted(first, node.order)


def _replayed(node: Replayed, leaf: Node, more: Callable[[Node], Node], extend: Extend) -> Node:
    at = node.labels.index(1)

    def extended(part: Any) -> Any:
        if isinstance(part, Node):
            return more(part)
        missing = len(node.shape) - part.dim()
        dim, rows = at - missing, node.labels.index(0) - missing
        if dim < 0:
            return part
        sizes = [-1] * part.dim()
        sizes[dim] = node.shape[at]
        return extend(part.expand(sizes), dim, rows if rows >= 0 else None)

    arguments = mapped((Node, Tensor), extended, node.arguments)
    shape = list(node.shape)
    shape[node.labels.index(0)], shape[at] = leaf.shape[:2]
    return Replayed(node.function, arguments, Like(torch.Size(shape), node.dtype), node.labels)
