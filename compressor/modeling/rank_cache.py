"""A cache of transformers that holds the ranks of keys and values. Shipped inside every checkpoint.

k and v projections of low rank give tensors without values (`deferred.py`); from these it takes the
input in the space of ranks, and what rotates the keys, and gives tensors of all tokens so far, which
attention reconstructs a few heads at a time. Rotations are kept once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from blr.compressor.modeling.deferred import Deferred
from blr.compressor.modeling.expressions import Node
from blr.compressor.modeling.rank_store import Held, RankStore, again, features_of, of_one_layer, renewed
from blr.compressor.modeling.settings import warn_once


class Table(NamedTuple):
    """A tensor of all tokens, its dimension of tokens and that of sequences, None where it has none."""

    tensor: Tensor
    tokens: int
    rows: int | None


class Tables:
    """Tensors of all tokens, as cosines and sines, that layers extend by the same ones of new tokens."""

    def __init__(self) -> None:
        self.known: list[tuple[Tensor | None, Tensor, Tensor]] = []  # before, new, after

    def extended(self, before: Tensor | None, new: Tensor, dim: int) -> Tensor:
        """`new` behind `before`, the same tensor for the same ones."""
        for old, piece, after in self.known:
            if old is before and _same(piece, new):
                return after
        after = new.clone() if before is None else _joined(before, new, dim)
        self.known.append((before, new, after))
        return after


class RankLayer(DynamicLayer):
    """One layer's keys and values by their ranks; whole ones where they come whole."""

    def __init__(self, tables: Tables, first: bool, kind: str) -> None:
        super().__init__()
        self.shared, self.first = tables, first
        self.stores = (RankStore(kind), RankStore(kind))
        self.tables: tuple[list[Table], ...] = ([], [])
        self.last: tuple[Any, Any] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append [B, H, t, D] each; all tokens' keys and values [B, H, T, D], without values where
        that is how they came."""
        given = (key_states, value_states)
        nodes = [t.node for t in given if isinstance(t, Deferred) and of_one_layer(t.node) is not None]
        if len(nodes) < 2 or self.is_initialized:
            if self.stores[0].length:
                self._make_whole()
            else:
                warn_once(
                    "keys and values came whole (gradients, torch.compile?): the cache holds them whole"
                )
            return super().update(key_states, value_states, *args, **kwargs)
        if self.first:
            self.shared.known.clear()
        self.last = (self._appended(0, nodes[0]), self._appended(1, nodes[1], nodes[0]))
        return tuple(Deferred(node) for node in self.last)

    def _appended(self, which: int, node: Node, earlier: Node | None = None) -> Node:
        source, store = of_one_layer(node), self.stores[which]
        assert source is not None
        start, stop = features_of(node)
        product, apart = source.product.window(start, stop)
        if not apart and earlier is not None and of_one_layer(earlier) is source:
            self.stores = (self.stores[0], self.stores[0])  # the same ranks, of a projection to both
            store = self.stores[0]
        else:
            store.append(product.inner(source.x))
        held = Held(store, product, stop - start if apart else source.shape[-1], source.dtype)
        old, new = iter(self.tables[which]), list[Table]()

        def extend(piece: Tensor, dim: int, rows: int | None) -> Tensor:
            before = next(old, None)
            whole = self.shared.extended(None if before is None else before.tensor, piece, dim)
            new.append(Table(whole, dim, rows))
            return whole

        made = again(node, held, extend)
        self.tables = (new, self.tables[1]) if which == 0 else (self.tables[0], new)
        return made

    def _make_whole(self) -> None:
        """From here on whole tensors."""
        assert self.last is not None
        keys, values = (node.part({}, {}) for node in self.last)
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.reset_ranks()

    def _renew(self) -> None:
        """The keys and values of all tokens are made of what is held now."""
        if self.last is not None:
            held = zip(self.last, self.stores, self.tables, strict=True)
            keys, values = (renewed(n, store, [t.tensor for t in each]) for n, store, each in held)
            self.last = keys, values

    def reset_ranks(self) -> None:
        """Forget them."""
        kind = self.stores[0].kind
        self.stores = (RankStore(kind), RankStore(kind))
        self.tables, self.last = ([], []), None

    @property
    def nbytes(self) -> int:
        """What its ranks take; rotations, which layers share, are not counted."""
        return sum(store.nbytes for store in self._apart())

    def _apart(self) -> list[RankStore]:
        """Its stores, each once."""
        return list(dict.fromkeys(self.stores))

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.stores[0].length or super().get_seq_length()

    def reset(self) -> None:
        """As of the dynamic layer."""
        self.reset_ranks()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """As of the dynamic layer: a negative number of tokens to remove; of early transformers
        also a positive one of tokens to keep."""
        length = self.stores[0].length
        kept = tokens_to_remove if tokens_to_remove > 0 else max(length + tokens_to_remove, 0)
        if not length:
            super().crop(tokens_to_remove)
        elif kept < length:
            self._change(1, lambda tensor, dim: tensor.narrow(dim, 0, kept))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As of the dynamic layer."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As of the dynamic layer."""
        if self.stores[0].length:
            self._change(0, lambda tensor, dim: tensor.index_select(dim, indices.to(tensor.device)))
        else:
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As of the dynamic layer."""
        if self.stores[0].length:
            self._change(0, lambda tensor, dim: tensor.repeat_interleave(repeats, dim))
        else:
            super().batch_repeat_interleave(repeats)

    def _change(self, label: int, function: Callable[[Tensor, int], Tensor]) -> None:
        """Apply `function` of a tensor and its dimension of sequences (label 0) or tokens (1) to all
        that is held; what is one for all sequences stays."""
        for store in self._apart():
            store.change(lambda tensor: function(tensor, label))

        def table(held: Table) -> Table:
            dim = held.tokens if label == 1 else held.rows
            if dim is None or (label == 0 and held.tensor.shape[dim] == 1):
                return held
            return held._replace(tensor=function(held.tensor, dim))

        self.tables = tuple([table(held) for held in each] for each in self.tables)
        self._renew()

    def offload(self) -> None:
        """Ranks to the CPU."""
        if self.stores[0].length:
            for store in self._apart():
                self.home = store.held[0].device
                store.change(lambda tensor: tensor.to("cpu", non_blocking=True))
            self._renew()
        else:
            super().offload()

    def prefetch(self) -> None:
        """Ranks back to where they came from."""
        if self.stores[0].length:
            for store in self._apart():
                store.change(
                    lambda tensor: tensor.to(getattr(self, "home", tensor.device), non_blocking=True)
                )
            self._renew()
        else:
            super().prefetch()


class RankCache(Cache):
    """The cache of a decoder whose k and v are of low rank.

    Args:
        layers: those that a `DynamicCache` of the model has; full ones are replaced.
        kind: of `rank_formats.FORMATS`.
    """

    def __init__(self, layers: list[Any], kind: str = "ranks", offloading: bool = False) -> None:
        tables = Tables()
        full = [type(layer) is DynamicLayer for layer in layers]
        made = [
            RankLayer(tables, n == full.index(True), kind) if full[n] else layer
            for n, layer in enumerate(layers)
        ]
        super().__init__(layers=made, offloading=offloading)

    @property
    def nbytes(self) -> int:
        """What the ranks of all layers take."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, RankLayer))


def rank_cache(cache: Any, config: Any, kind: str) -> Any:
    """`cache`, or a `RankCache` in the place of an empty `DynamicCache` that transformers made.

    Args:
        kind: of `settings.caches_ranks`.
    """
    if type(cache) is not DynamicCache or cache.get_seq_length():
        return cache
    count = config.get_text_config(decoder=True).num_hidden_layers
    layers = list(cache.layers) or [DynamicLayer() for _ in range(count)]
    return RankCache(layers, kind, cache.offloading)


def _joined(before: Tensor, new: Tensor, dim: int) -> Tensor:
    """Both along `dim`; what one has once for all sequences, and the other for each, is repeated."""
    sizes = list(torch.broadcast_shapes(*(held.narrow(dim, 0, 1).shape for held in (before, new))))
    sizes[dim] = -1
    return torch.cat((before.expand(sizes), new.expand(sizes)), dim)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of the same numbers by where they lie."""
    lie = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype
    return lie and a.shape == b.shape and a.stride() == b.stride()
