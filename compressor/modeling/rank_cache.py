"""A cache of transformers that holds the ranks of keys and values.

They are held in their dtype, in int8, or in int8 for the first quarter and int4 for the others, which
loses a sixth or less of what int4 alone does (`scripts/log`).

An attention (`rank_attention.py`) gives it the ranks of new tokens and gets all tokens' keys and values,
made from ranks for one layer at a time. Rotations are kept once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from blr.compressor.modeling.settings import warn_once
from blr.compressor.structures.cached import KV_CACHES, leading

if TYPE_CHECKING:
    from blr.compressor.modeling.rank_attention import RankStep

LARGEST = {"int8": 127, "int4": 7}

Parts = tuple[Tensor, ...]


class RankFormat(NamedTuple):
    """Ranks [B, T, …, r] to what is held of them, [B, T, …] each, and back in a dtype."""

    pack: Callable[[Tensor], Parts]
    unpack: Callable[[Parts, torch.dtype], Tensor]


def _rounded(ranks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Whole numbers in int8, and the scale of every token's ranks. In float32: half precision has no
    number between 127 and 128, which int8 has not."""
    wide, most = ranks.float(), LARGEST[kind]
    scale = (wide.abs().amax(-1, keepdim=True) / most).to(ranks.dtype)
    scale = scale.clamp_min(torch.finfo(ranks.dtype).tiny)
    return (wide / scale.float()).round().clamp(-most, most).to(torch.int8), scale


def _scaled(parts: Parts, dtype: torch.dtype) -> Tensor:
    whole, scale = parts
    return whole.to(dtype) * scale


def _mixed(ranks: Tensor) -> Parts:
    """Whole numbers of the first ranks and their scale, then the others', two a byte, and theirs."""
    first, others = ranks.tensor_split([leading(ranks.shape[-1])], -1)
    if not others.shape[-1]:
        return _rounded(first, "int8")
    whole, scale = _rounded(others, "int4")
    low, high = (whole + 8).to(torch.uint8).unflatten(-1, (2, -1)).unbind(-2)
    return *_rounded(first, "int8"), low | high << 4, scale


def _unmixed(parts: Parts, dtype: torch.dtype) -> Tensor:
    first = _scaled(parts[:2], dtype)
    if len(parts) == 2:
        return first
    pairs, scale = parts[2:]
    whole = torch.cat((pairs & 15, pairs >> 4), -1).to(dtype) - 8
    return torch.cat((first, whole * scale), -1)


def _kept(ranks: Tensor) -> Parts:
    return (ranks,)


def _only(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts[0]


_FORMATS = (  # by names that pickle finds: a cache may be kept in a file
    RankFormat(_kept, _only),
    RankFormat(partial(_rounded, kind="int8"), _scaled),
    RankFormat(_mixed, _unmixed),
)
FORMATS = dict(zip(KV_CACHES, _FORMATS, strict=True))


Angles = tuple[Tensor, Tensor]  # cosines and sines [B or 1, T, d]


class RankStore:
    """Ranks [B, T, …, r] of all tokens so far, in one of `FORMATS`."""

    def __init__(self, kind: str) -> None:
        self.format = FORMATS[kind]
        self.held: Parts = ()

    @property
    def length(self) -> int:
        """T."""
        return self.held[0].shape[1] if self.held else 0

    @property
    def nbytes(self) -> int:
        """Of what is held."""
        return sum(tensor.nbytes for tensor in self.held)

    def append(self, new: Parts) -> None:
        """What the format makes of the ranks of new tokens."""
        pairs = zip(self.held, new, strict=True)
        self.held = tuple(torch.cat(pair, 1) for pair in pairs) if self.held else new

    def ranks(self, dtype: torch.dtype) -> Tensor:
        """Of all tokens."""
        return self.format.unpack(self.held, dtype)

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put ``function`` of what is held, whose first dimensions are B and T, in its place."""
        self.held = tuple(function(tensor) for tensor in self.held)


class AngleTable:
    """Cosines and sines of all tokens, for all layers that are given the same. The first of these, the
    leader, extends and changes them."""

    def __init__(self, leader: RankLayer, new: Angles) -> None:
        self.leader, self.new, self.all = leader, new, new

    def extend(self, new: Angles) -> None:
        """By those of new tokens."""
        pairs = zip(self.all, new, strict=True)
        self.new, self.all = new, (_joined(*next(pairs)), _joined(*next(pairs)))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put ``function`` of them in their place."""
        cosines, sines = self.all
        self.all = function(cosines), function(sines)


class RankLayer(DynamicLayer):
    """One layer's keys and values by their ranks; whole ones where they come whole. rotations: those of
    the cache. step: what an attention makes of new tokens, while it does."""

    stores: tuple[RankStore, RankStore]
    rotation: AngleTable | None
    step: RankStep | None = None

    def __init__(self, rotations: list[AngleTable], kind: str) -> None:
        super().__init__()
        self.rotations, self.kind = rotations, kind
        self.reset_ranks()

    @property
    def length(self) -> int:
        """Tokens whose ranks it holds."""
        return self.stores[0].length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
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
        self._append(step)
        return (key_states, value_states) if first else step.all_of(self)

    def _append(self, step: RankStep) -> None:
        keys, values = step.keys.parts, step.values.parts
        if values is keys:
            self.stores = (self.stores[0], self.stores[0])  # the same ranks, of a projection to both
        else:
            self.stores[1].append(values)
        self.stores[0].append(keys)
        if step.angles is not None:
            self._rotate(step.angles)

    def _rotate(self, new: Angles) -> None:
        if self.rotation is None:
            self.rotation = next((known for known in self.rotations if _same(known.new, new)), None)
            if self.rotation is None:
                self.rotation = AngleTable(self, new)
                self.rotations.append(self.rotation)
        elif self.rotation.leader is self:
            self.rotation.extend(new)

    def hold_whole(self, keys: Tensor, values: Tensor) -> None:
        """From here on whole tensors: these of all tokens so far."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.reset_ranks()

    def reset_ranks(self) -> None:
        """Forget them."""
        self.stores = (RankStore(self.kind), RankStore(self.kind))
        self.rotation = None

    @property
    def nbytes(self) -> int:
        """What its ranks take; rotations, which layers share, are not counted."""
        return sum(store.nbytes for store in self._apart())

    def _apart(self) -> list[RankStore]:
        """Its stores, each once."""
        return list(dict.fromkeys(self.stores))

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length or super().get_seq_length()

    def reset(self) -> None:
        """As of the dynamic layer."""
        self.rotations.clear()
        self.reset_ranks()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """As of the dynamic layer: a negative number of tokens to remove; of early transformers
        also a positive one of tokens to keep."""
        kept = tokens_to_remove if tokens_to_remove > 0 else max(self.length + tokens_to_remove, 0)
        if not self.length:
            super().crop(tokens_to_remove)
        elif kept < self.length:
            self._change(lambda tensor: tensor.narrow(1, 0, kept))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """As of the dynamic layer."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """As of the dynamic layer."""
        if self.length:
            self._change_rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))
        else:
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As of the dynamic layer."""
        if self.length:
            self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))
        else:
            super().batch_repeat_interleave(repeats)

    def _change_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        rows = self.stores[0].held[0].shape[0]
        self._change(lambda tensor: function(tensor) if len(tensor) == rows else tensor)

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to all that is held, [B, T, …]."""
        for store in self._apart():
            store.change(function)
        if self.rotation is not None and self.rotation.leader is self:
            self.rotation.change(function)

    def offload(self) -> None:
        """Ranks to the CPU."""
        if self.length:
            self.home = self.stores[0].held[0].device
            self._move(torch.device("cpu"))
        else:
            super().offload()

    def prefetch(self) -> None:
        """Ranks back to where they came from."""
        if self.length:
            self._move(getattr(self, "home", self.stores[0].held[0].device))
        else:
            super().prefetch()

    def _move(self, device: torch.device) -> None:
        for store in self._apart():
            store.change(lambda tensor: tensor.to(device, non_blocking=True))


class RankCache(Cache):
    """The cache of a decoder whose k and v are of low rank.

    Args:
        layers: those that a `DynamicCache` of the model has; full ones are replaced.
        kind: of `FORMATS`.
    """

    def __init__(self, layers: Iterable[Any], kind: str = "ranks", offloading: bool = False) -> None:
        rotations: list[AngleTable] = []
        made = [RankLayer(rotations, kind) if type(layer) is DynamicLayer else layer for layer in layers]
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


def _joined(before: Tensor, new: Tensor) -> Tensor:
    """Both along the tokens; what one has for all sequences, and the other for each, is repeated."""
    rows = max(len(before), len(new))
    return torch.cat([held.expand(rows, -1, -1) for held in (before, new)], 1)


def _same(known: Angles, new: Angles) -> bool:
    """Whether two tables are the same tensors by where they lie."""
    return all(
        a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(known, new, strict=True)
    )
