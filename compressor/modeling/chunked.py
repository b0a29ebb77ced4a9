"""Attention and products that take tensors without values a chunk at a time. Shipped inside every
checkpoint.

A chunk is as many whole sequences as the bound of memory holds; of one that is too long for it, a
linear layer takes stretches of tokens and attention some heads, reconstructed from the space of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from blr.compressor.modeling.expressions import (
    HEADS,
    Heads,
    Memo,
    Node,
    Permuted,
    Region,
    Repeated,
    Replayed,
    forget_parts,
    sliced,
)
from blr.compressor.modeling.rank_store import Held
from blr.kernels.common.transient import bound_for, chunks, tokens_within
from blr.kernels.fused.normed.launch import layer_norm as normed

FEW = 8  # queries up to which values stay in the space of ranks


def linear(node: Any, weight: Any, bias: Any = None) -> Any:
    """`torch.nn.functional.linear` of a node."""
    if isinstance(weight, Node) or isinstance(bias, Node):
        return NotImplemented
    return by_tokens(node, weight.shape[0], lambda x, _: functional.linear(x, weight, bias))


def by_tokens(node: Node, outputs: int, product: Callable[[Tensor, Tensor | None], Tensor]) -> Any:
    """``product`` [..., outputs] of a node [..., i], as many tokens at a time as the bound holds.

    NotImplemented for a node whose tokens are not the first dimensions.

    Args:
        product: of a part, and of where it may put what it gives.
    """
    if not has_tokens(node):
        return NotImplemented
    out: Tensor | None = None
    for region in regions(node.shape[:-1], tokens_within(_bound([node]), _width(node, outputs))):
        part = node.part(region, {})
        if part.shape[:-1] == node.shape[:-1]:
            return product(part, None)
        if out is None:
            out = part.new_empty((*node.shape[:-1], outputs))
        place = sliced(out, out.shape, node.labels, region)
        if (made := product(part, place)) is not place:
            place.copy_(made)
        del part, made  # before the next ones are made
    return product(node.part({}, {}), None) if out is None else out  # the former of no tokens


def layer_norm(node: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """`torch.nn.functional.layer_norm` of a node over its features."""
    if not isinstance(node, Node) or node.labels[-1] != "o" or tuple(shape) != tuple(node.shape[-1:]):
        return NotImplemented
    if weight is None:
        norm = functional.layer_norm
        return by_tokens(node, node.shape[-1], lambda x, _: norm(x, shape, None, bias, eps))
    return by_tokens(node, node.shape[-1], lambda x, out: normed(x, weight, bias, eps, out))


def has_tokens(node: Node) -> bool:
    """Whether its first dimensions are the tokens of a layer's input, as they were."""
    return node.labels[:-1] == tuple(range(len(node.shape) - 1))


def regions(lead: tuple[int, ...], tokens: int) -> Iterator[Region]:
    """Parts of about `tokens` tokens of the dimensions `lead`: whole entries of the first, else
    stretches of the second."""
    entry = 1
    for size in lead[1:]:
        entry *= size
    if len(lead) == 1 or entry <= tokens:
        for bounds in chunks(lead[0], tokens // max(entry, 1)):
            yield {0: bounds}
        return
    rest = entry // max(lead[1], 1)
    for row in range(lead[0]):
        for bounds in chunks(lead[1], max(tokens // max(rest, 1), 1)):
            yield {0: (row, row + 1), 1: bounds}


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` of [B, H, T, D], some of them nodes.

    Gives [B, H, T, D] that lies as [B, T, H, D]; NotImplemented for other shapes.
    """
    if query.shape[2] <= FEW and isinstance(value, Repeated) and _repeats(key) == value.times:
        key, value, enable_gqa = key.of[0], value.of[0], True
    if (found := _ranked(query, value)) is not None:
        ranks, product = found
        rest = (attn_mask, dropout_p, is_causal, _scale(query, scale), enable_gqa)
        weighted = attention(query, key, ranks, *rest)
        return NotImplemented if weighted is NotImplemented else product.of_heads(weighted)
    given = (query, key, value)
    nodes = [t for t in given if isinstance(t, Node)]
    if any(node.labels != HEADS for node in nodes) or any(len(t.shape) != 4 for t in given):
        return NotImplemented
    if isinstance(attn_mask, Node) or (attn_mask is not None and attn_mask.dim() > 4):
        return NotImplemented
    options: Any = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    rows, heads, length, _ = query.shape
    made = torch.empty(
        (rows, length, heads, value.shape[-1]), dtype=query.dtype, device=query.device
    ).transpose(1, 2)
    group = heads // key.shape[1] if enable_gqa else _repeats(key)
    attend: Any = functional.scaled_dot_product_attention
    memos: dict[tuple[int, int], Memo] = {}
    for region in _heads(rows, heads, group, _row_bytes(nodes), _bound(nodes)):
        if region[0] not in memos:
            memos = {region[0]: {}}
        tensors = [_part(t, region, heads, memos[region[0]]) for t in given]
        mask = None if attn_mask is None else sliced(attn_mask, made.shape, HEADS, region)
        part = attend(*tensors, attn_mask=mask, **options)
        sliced(made, made.shape, HEADS, region).copy_(part)
        del tensors, part  # before the next ones are made
    return made


def _ranked(query: Any, value: Any) -> tuple[Tensor, Any] | None:
    """Values that a cache holds head by head, [B, H, T, r], and their product: of few queries the
    weighted sums are taken in the space of ranks. None for all others."""
    pure = isinstance(value, Permuted) and value.labels == HEADS and isinstance(value.of[0], Heads)
    held = value.of[0].of[0] if pure else None
    if not isinstance(held, Held) or query.shape[2] > FEW or value.value is not None:
        return None
    ranks = held.inner({})
    by_head = ranks.dim() == 4 and ranks.shape[2] == value.shape[1]
    return (ranks.transpose(1, 2), held.product) if by_head else None


def _scale(query: Any, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _heads(rows: int, heads: int, group: int, row_bytes: int, bound: int) -> Iterator[Region]:
    """Sequences that fit the bound, or heads of one: whole groups that share a key."""
    if row_bytes <= bound:
        for bounds in chunks(rows, bound // max(row_bytes, 1)):
            yield {0: bounds}
        return
    at_once = max(bound * heads // (row_bytes * group), 1)
    for row in range(rows):
        for start, stop in chunks(heads // group, at_once):
            yield {0: (row, row + 1), "h": (start * group, stop * group)}


def _part(tensor: Any, region: Region, heads: int, memo: Memo) -> Tensor:
    """Of a query, key or value, which may have fewer heads than the query."""
    if "h" in region and tensor.shape[1] != heads:
        start, stop = region["h"]
        times = heads // tensor.shape[1]
        region = {**region, "h": (start // times, stop // times)}
    if not isinstance(tensor, Node):
        return sliced(tensor, tensor.shape, HEADS, region)
    part = tensor.part(region, memo)
    forget_parts(memo)
    return part


def _repeats(key: Any) -> int:
    return key.times if isinstance(key, Repeated) else 1


def _row_bytes(nodes: list[Node]) -> int:
    """Bytes of one sequence's q, k and v, and of what rotates one of them, if anything does."""
    rotated = [_bytes(node) for node in nodes if any(isinstance(n, Replayed) for n in _all_of(node))]
    return sum(map(_bytes, nodes)) + max(rotated, default=0)


def _all_of(node: Node) -> Iterator[Node]:
    """A node and what it is made from."""
    yield node
    for part in node.of:
        yield from _all_of(part)


def _bytes(node: Node) -> int:
    return node.shape[1:].numel() * node.dtype.itemsize


def _width(node: Node, outputs: int) -> int:
    """Bytes of one token of a node, of what it is made from at one time and of what is made of it."""
    steps = [n for n in _all_of(node) if isinstance(n, Replayed)]
    over = all(n.overwrites({}) for n in steps)
    made = node.widest * len(node.sources) + (min(outputs, node.widest) if over else node.widest)
    return int(made * node.dtype.itemsize)


def _bound(nodes: list[Node]) -> int:
    """In bytes, of the input of a layer that they are made from; where there is none any more, or all
    that is made is in a cache, all at once."""
    found = [bound_for(source.x) for node in nodes for source in node.sources]
    bound = min((each for each in found if each is not None), default=None)
    return 1 << 62 if bound is None else bound


CONSUMERS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "layer_norm": layer_norm,
    "scaled_dot_product_attention": attention,
}
