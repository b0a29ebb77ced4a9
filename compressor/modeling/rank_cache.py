"""A cache of transformers that holds the ranks of keys and values in the place of these: in their dtype,
in int8, or a quarter in int8 and the others in int4 (`scripts/log`). An attention (`rank_attention.py`)
gives it ranks of new tokens and gets all tokens' keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from blr.compressor.modeling.settings import warn_once
from blr.compressor.structures.cached import KV_CACHES, leading

if TYPE_CHECKING:
    from blr.compressor.modeling.rank_attention import RankStep

LARGEST = {"int8": 127, "int4": 7}
Parts = tuple[Tensor, ...]
Angles = tuple[Tensor, Tensor]  # cosines and sines [B or 1, T, d]


class RankFormat(NamedTuple):
    """How ranks [B, T, …, r] are held: `pack` makes the tensors [B, T, …] that are held, `unpack` ranks
    of a dtype from these. Functions by names that pickle finds: a cache may be kept in a file."""

    pack: Callable[[Tensor], Parts]
    unpack: Callable[[Parts, torch.dtype], Tensor]


def _rounded(ranks: Tensor, kind: str = "int8") -> tuple[Tensor, Tensor]:
    """Ranks rounded to whole numbers in int8, and each token's scale. Computed in float32: half
    precision has no number between 127 and 128, and int8 ends at 127."""
    wide, most = ranks.float(), LARGEST[kind]
    scale = (wide.abs().amax(-1, keepdim=True) / most).to(ranks.dtype)
    scale = scale.clamp_min(torch.finfo(ranks.dtype).tiny)
    return (wide / scale.float()).round().clamp(-most, most).to(torch.int8), scale


def _scaled(parts: Parts, dtype: torch.dtype) -> Tensor:
    whole, scale = parts
    return whole.to(dtype) * scale


def _mixed(ranks: Tensor) -> Parts:
    """The first ranks in int8 and their scale, then the others in int4, two a byte, and their scale."""
    first, others = ranks.tensor_split([leading(ranks.shape[-1])], -1)
    if not others.shape[-1]:
        return _rounded(first)
    whole, scale = _rounded(others, "int4")
    low, high = (whole + 8).to(torch.uint8).unflatten(-1, (2, -1)).unbind(-2)
    return *_rounded(first), low | high << 4, scale


def _unmixed(parts: Parts, dtype: torch.dtype) -> Tensor:
    first = _scaled(parts[:2], dtype)
    if len(parts) == 2:
        return first
    pairs, scale = parts[2:]
    whole = torch.cat((pairs & 15, pairs >> 4), -1).to(dtype) - 8
    return torch.cat((first, whole * scale), -1)


def _whole(ranks: Tensor) -> Parts:
    return (ranks,)


def _only(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts[0]


_FORMATS = RankFormat(_whole, _only), RankFormat(_rounded, _scaled), RankFormat(_mixed, _unmixed)
FORMATS = dict(zip(KV_CACHES, _FORMATS, strict=True))


class Tokens:
    """Tensors `held` [B, T, …] of all tokens so far."""

    held: Parts = ()

    @property
    def length(self) -> int:
        return self.held[0].shape[1] if self.held else 0

    def append(self, new: Parts) -> None:
        """Add those of new tokens; one for all sequences is repeated where the other has one each."""
        pairs = zip(self.held, new, strict=True) if self.held else ()
        self.held = tuple(_joined(*pair) for pair in pairs) or new

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by ``function`` of it."""
        self.held = tuple(map(function, self.held))


class AngleTable(Tokens):
    """Cosines and sines of all tokens, shared by all layers that are given the same. The first of these
    layers, the leader, extends and changes them. new: those of the newest tokens."""

    held: Angles

    def __init__(self, leader: RankLayer, new: Angles) -> None:
        self.leader, self.new, self.held = leader, new, new


class RankLayer(DynamicLayer):
    """Holds one layer's keys and values as ranks, or whole where they come whole. rotations: the tables
    of the cache. kind: the name of its format. step: what an attention makes of new tokens, or None."""

    stores: tuple[Tokens, Tokens]
    rotation: AngleTable | None
    step: RankStep | None = None

    def __init__(self, rotations: list[AngleTable], kind: str) -> None:
        super().__init__()
        self.rotations, self.kind = rotations, kind
        self.reset_ranks()

    @property
    def length(self) -> int:
        return self.stores[0].length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, t, D] each; all tokens' keys and values [B, H, T, D]."""
        step, self.step = self.step, None
        if step is None or self.is_initialized or not step.explains(key_states, value_states):
            if self.length:
                raise RuntimeError(
                    "a cache that holds ranks was given whole keys and values: expected an attention of "
                    "low-rank k and v as before; start with a new cache"
                )
            warn_once(
                "keys and values came whole (gradients, torch.compile?): the cache holds them whole"
            )
            return super().update(key_states, value_states, *args, **kwargs)
        first = not self.length
        keys, values = step.made["keys"].parts, step.made["values"].parts
        if values is keys:
            self.stores = (self.stores[0], self.stores[0])  # the same ranks, of a projection to both
        else:
            self.stores[1].append(values)
        self.stores[0].append(keys)
        if step.angles is not None:
            self._rotate(step.angles)
        return (key_states, value_states) if first else step.all_of(self)

    def _rotate(self, new: Angles) -> None:
        if self.rotation is None:
            self.rotation = next((known for known in self.rotations if _same(known.new, new)), None)
            if self.rotation is None:
                self.rotation = AngleTable(self, new)
                self.rotations.append(self.rotation)
        elif self.rotation.leader is self:
            self.rotation.new = new
            self.rotation.append(new)

    def hold_whole(self, keys: Tensor, values: Tensor) -> None:
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.reset_ranks()

    def reset_ranks(self) -> None:
        self.stores = (Tokens(), Tokens())
        self.rotation = None

    @property
    def nbytes(self) -> int:
        """The bytes of its ranks, without rotations, which layers share."""
        return sum(tensor.nbytes for store in set(self.stores) for tensor in store.held)

    def get_seq_length(self) -> int:
        return self.length or super().get_seq_length()

    def reset(self) -> None:
        self.rotations.clear()
        self.reset_ranks()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Keep all but so many tokens (negative), or so many (positive, of an early transformers)."""
        kept = tokens_to_remove if tokens_to_remove > 0 else max(self.length + tokens_to_remove, 0)
        if not self.length:
            super().crop(tokens_to_remove)
        elif kept < self.length:
            self._change(lambda tensor: tensor.narrow(1, 0, kept))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.length:
            self._change_rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))
        else:
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.length:
            self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))
        else:
            super().batch_repeat_interleave(repeats)

    def _change_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        rows = self.stores[0].held[0].shape[0]
        self._change(lambda tensor: function(tensor) if len(tensor) == rows else tensor)

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor that is held, [B, T, …], by ``function`` of it."""
        for store in set(self.stores):
            store.change(function)
        if self.rotation is not None and self.rotation.leader is self:
            self.rotation.change(function)

    def offload(self) -> None:
        if self.length:
            self.home = self.stores[0].held[0].device
            self._move(torch.device("cpu"))
        else:
            super().offload()

    def prefetch(self) -> None:
        if self.length:
            self._move(getattr(self, "home", self.stores[0].held[0].device))
        else:
            super().prefetch()

    def _move(self, device: torch.device) -> None:
        for store in set(self.stores):
            store.change(lambda tensor: tensor.to(device, non_blocking=True))


class RankCache(Cache):
    """The cache of a decoder whose k and v are of low rank. layers: those that a `DynamicCache` of the
    model has; full ones are replaced. kind: of `FORMATS`."""

    def __init__(self, layers: Iterable[Any], kind: str = "ranks", offloading: bool = False) -> None:
        rotations: list[AngleTable] = []
        made = [RankLayer(rotations, kind) if type(layer) is DynamicLayer else layer for layer in layers]
        super().__init__(layers=made, offloading=offloading)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, RankLayer))


def rank_cache(cache: object, config: PreTrainedConfig, kind: str) -> object:
    """`cache`, or a `RankCache` of this kind (`caches_ranks`) for an empty `DynamicCache`."""
    if type(cache) is not DynamicCache or cache.get_seq_length():
        return cache
    count = config.get_text_config(decoder=True).num_hidden_layers
    layers = list(cache.layers) or [DynamicLayer() for _ in range(count)]
    return RankCache(layers, kind, cache.offloading)


def _joined(before: Tensor, new: Tensor) -> Tensor:
    rows = max(len(before), len(new))
    return torch.cat([t.expand(rows, *t.shape[1:]) for t in (before, new)], 1)


def _same(known: Angles, new: Angles) -> bool:
    return all(
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(known, new, strict=True)
    )
