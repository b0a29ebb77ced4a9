"""Results that are not computed yet, of which parts can be. Shipped inside every checkpoint.

A node stands for a tensor: the output of a structured layer (`Source`), or what a model makes of it
before it is consumed: heads, rotations, activations. Each dimension has a label by which a part of the
node is asked for: its number where it is one of the layer's input (sequences, tokens), "o" for the
features of the layer's output, "h" for heads, None where every part has the whole dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Size, Tensor

Label = int | str | None
Region = dict[Any, tuple[int, int]]  # label to (start, stop); what is not named is whole
# What parts of one region share: by source, its input in the space of ranks; by node and region, a part
# that several nodes are made from.
Memo = dict[Any, Tensor]
HEADS = (0, "h", 1, None)  # labels of [B, H, T, D]


class Node:
    """A tensor that is not computed yet.

    labels: one a dimension. value: the whole tensor, once somebody had to have it. widest: the most
    features of it and of what it is made from. uses: nodes that are made from it at once.
    """

    uses = 0

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, labels: tuple[Label, ...], of: Sequence[Node]
    ) -> None:
        self.shape, self.dtype, self.labels, self.of = Size(shape), dtype, labels, tuple(of)
        self.value: Tensor | None = None
        self.widest: int = max(self.shape[-1], *(node.widest for node in of), 1)
        self.inputs: frozenset[Source] = frozenset().union(*(node.sources for node in of))
        for node in of:
            node.uses += 1
        for source in self.sources:
            source.dependents.add(self)

    @property
    def sources(self) -> frozenset[Source]:
        """The layers' outputs that it is made from."""
        return self.inputs

    @property
    def device(self) -> torch.device:
        """That of the input."""
        return self.of[0].device

    def part(self, region: Region, memo: Memo) -> Tensor:
        """The part that `region` names."""
        if self.value is not None:
            return sliced(self.value, self.shape, self.labels, region)
        if self.uses < 2 or isinstance(self, Source | Narrow):  # parts of these are other ones each time
            return self._part(region, memo)
        key = (id(self), *region.items())
        if key not in memo:
            memo[key] = self._part(region, memo)
        return memo[key]

    def settle(self) -> Tensor:
        """The whole tensor, kept, and that of all that it is made from, so that views are views."""
        for node in self.of:
            node.settle()
        if self.value is None:
            self.value = self._part({}, {})
        return self.value

    def _part(self, region: Region, memo: Memo) -> Tensor:
        raise NotImplementedError


class Source(Node):
    """The output [..., o] of a layer for x [..., i]; `product` as of `StructuredLinear.bound`."""

    def __init__(self, x: Tensor, product: Any, outputs: int) -> None:
        self.x, self.product = x, product
        self.version = _version(x)
        self.dependents: WeakSet[Node] = WeakSet()
        labels: tuple[Label, ...] = (*range(x.dim() - 1), "o")
        super().__init__((*x.shape[:-1], outputs), x.dtype, labels, ())

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def sources(self) -> frozenset[Source]:
        """Itself; not kept, since what refers to itself lives until the collector finds it."""
        return frozenset((self,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        x, features = self._tokens(region), region.get("o")
        if features is None:
            result: Tensor = self.product(x)
            return result
        if id(self) not in memo:
            memo[id(self)] = self.product.inner(x)
        part: Tensor = self.product.outer(memo[id(self)], *features)
        return part

    def activated(self, region: Region, activation: str) -> Tensor | None:
        """All features of a part behind an activation, if one kernel makes them so."""
        result: Tensor | None = self.product.activated(self._tokens(region), activation)
        return result

    def _tokens(self, region: Region) -> Tensor:
        """The layer's input of a part. Raises RuntimeError if that was written to meanwhile."""
        if _version(self.x) != self.version:
            raise RuntimeError(
                "the input of a layer was changed in place before its output was read: "
                "set BLR_TRANSIENT=off for this model"
            )
        tokens = {label: bounds for label, bounds in region.items() if label != "o"}
        return sliced(self.x, self.x.shape, self.labels, tokens)


class Chained(Node):
    """The output [..., o] of a layer for a node [..., i], whose tokens are the first dimensions."""

    def __init__(self, node: Node, product: Any, outputs: int) -> None:
        self.product = product
        labels: tuple[Label, ...] = (*range(len(node.shape) - 1), "o")
        super().__init__((*node.shape[:-1], outputs), node.dtype, labels, (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        tokens = {label: bounds for label, bounds in region.items() if label != "o"}
        result: Tensor = self.product(self.of[0].part(tokens, memo))
        return result if "o" not in region else result[..., slice(*region["o"])]


class Narrow(Node):
    """Features start…stop of the last dimension, which is a layer's."""

    def __init__(self, node: Node, start: int, stop: int) -> None:
        self.start = start
        super().__init__((*node.shape[:-1], stop - start), node.dtype, node.labels, (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        start, stop = region.get("o", (0, self.shape[-1]))
        inner = {**region, "o": (self.start + start, self.start + stop)}
        return self.of[0].part(inner, memo)


class Heads(Node):
    """[..., o] as [..., H, D]."""

    def __init__(self, node: Node, heads: int, width: int) -> None:
        labels = (*node.labels[:-1], "h", None)
        super().__init__((*node.shape[:-1], heads, width), node.dtype, labels, (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        inner, width = dict(region), self.shape[-1]
        if (heads := inner.pop("h", None)) is not None:
            inner["o"] = (heads[0] * width, heads[1] * width)
        return self.of[0].part(inner, memo).unflatten(-1, (-1, width))


class Permuted(Node):
    """Dimensions in another order."""

    def __init__(self, node: Node, order: Sequence[int]) -> None:
        self.order = tuple(order)
        shape, labels = [node.shape[d] for d in order], [node.labels[d] for d in order]
        super().__init__(shape, node.dtype, tuple(labels), (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        return self.of[0].part(region, memo).permute(self.order)


class Expanded(Node):
    """[B, H, T, D] as [B, H, n, T, D], every head n times: the middle of `repeat_kv` of transformers."""

    def __init__(self, node: Node, times: int) -> None:
        self.times = times
        shape, labels = list(node.shape), list(node.labels)
        shape.insert(2, times)
        labels.insert(2, None)
        super().__init__(shape, node.dtype, tuple(labels), (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        return self.of[0].part(region, memo)[:, :, None].expand(-1, -1, self.times, -1, -1)


class Repeated(Node):
    """[B, H, T, D] as [B, H·n, T, D], every head n times in a row."""

    def __init__(self, node: Node, times: int) -> None:
        self.times = times
        rows, heads, *rest = node.shape
        super().__init__((rows, heads * times, *rest), node.dtype, node.labels, (node,))

    def _part(self, region: Region, memo: Memo) -> Tensor:
        start, stop = region.get("h", (0, self.shape[1]))
        first, last = start // self.times, -(-stop // self.times)
        held = self.of[0].part({**region, "h": (first, last)} if "h" in region else region, memo)
        whole = held[:, :, None].expand(-1, -1, self.times, -1, -1).flatten(1, 2)
        return whole[:, start - first * self.times : stop - first * self.times]


class Replayed(Node):
    """A function whose result for a part of its arguments is that part of its result.

    arguments: (args, kwargs) with nodes and tensors anywhere; tensors broadcast to the result's shape.
    over: the same function writing over its first argument, or None. activation: what kernels call it,
    or "".
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        like: Like,
        labels: tuple[Label, ...],
        over: Callable[..., Any] | None = None,
        activation: str = "",
    ) -> None:
        self.function, self.arguments, self.over = function, arguments, over
        self.activation = activation
        self.plain = not any(isinstance(leaf, tuple | list | dict) for leaf in _values(arguments))
        super().__init__(like.shape, like.dtype, labels, leaves(arguments, Node))

    def overwrites(self, region: Region) -> bool:
        """Whether a part may be made in the memory of its first argument's: a product or a result that
        nobody else reads."""
        first = self.arguments[0][0] if self.over is not None and self.arguments[0] else None
        if not isinstance(first, Source | Chained | Replayed) or first.value is not None:
            return False
        fresh = first.over is not None if isinstance(first, Replayed) else "o" not in region
        return fresh and first.uses == 1 and (first.shape, first.dtype) == (self.shape, self.dtype)

    def _part(self, region: Region, memo: Memo) -> Tensor:
        if (made := self._activated(region)) is not None:
            return made

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                return leaf.part(region, memo)
            if isinstance(leaf, Tensor):
                return sliced(leaf, self.shape, self.labels, region)
            return leaf

        args, kwargs = self.arguments
        if self.plain:  # the usual case, several times faster
            args, kwargs = [tensor(arg) for arg in args], {n: tensor(arg) for n, arg in kwargs.items()}
        else:
            args, kwargs = mapped((Node, Tensor), tensor, self.arguments)
        function = self.over if self.over is not None and self.overwrites(region) else self.function
        result: Tensor = function(*args, **kwargs)
        return result

    def _activated(self, region: Region) -> Tensor | None:
        """The part by the kernel that makes the product which it is an activation of."""
        if not self.activation or not self.overwrites(region):
            return None
        first = self.arguments[0][0]
        return first.activated(region, self.activation) if isinstance(first, Source) else None


class Like(NamedTuple):
    """What a result would be."""

    shape: Size
    dtype: torch.dtype


def mapped(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` of tuples, lists and dicts with `function` of every leaf of `kind`. That of
    `torch.utils._pytree` takes 20 to 50 µs a call, as long as a chunk does on a GPU."""
    if isinstance(tree, kind):
        return function(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([mapped(kind, function, leaf) for leaf in tree])
    if type(tree) is dict:
        return {key: mapped(kind, function, leaf) for key, leaf in tree.items()}
    return tree


def _values(arguments: Any) -> tuple[Any, ...]:
    """Of (args, kwargs)."""
    return (*arguments[0], *arguments[1].values())


def leaves(tree: Any, kind: Any) -> list[Any]:
    """Those of `kind` in a tree of tuples, lists and dicts."""
    found: list[Any] = []
    mapped(kind, found.append, tree)
    return found


def forget_parts(memo: Memo) -> None:
    """What only parts of one tensor share: from here on they would take memory beside it."""
    for key in [key for key in memo if isinstance(key, tuple)]:
        del memo[key]


def sliced(tensor: Tensor, shape: Sequence[int], labels: Sequence[Label], region: Region) -> Tensor:
    """The part of `tensor`, which broadcasts to `shape`, where the result's `region` is."""
    offset = len(shape) - tensor.dim()
    for dim in range(tensor.dim()):
        bounds = region.get(labels[dim + offset])
        if bounds is not None and labels[dim + offset] is not None and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, bounds[0], bounds[1] - bounds[0])
    return tensor


def _version(x: Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return 0 if x.is_inference() else x._version
