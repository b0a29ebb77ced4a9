"""The key/value cache: static tensors that both the decoding kernels and transformers write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PrefillLayer(CacheLayerMixin):
    """A layer of transformers' cache over slots of tensors that are not its own.

    keys, values: [B, Hkv, L, D]; the slots from `length` on are free.
    """

    is_compileable = False
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, Hkv, T, D] each; returns views of all slots in use."""
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the slots that a mask covers."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.length

    def get_max_length(self) -> int:
        """Slots there are."""
        return self.keys.shape[-2]


class StaticKV:
    """Keys and values of all layers: [layers, 2, B, Hkv, L, D] in one allocation, zeros."""

    def __init__(self, config: Any, rows: int, context: int, width: int, like: Tensor) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, context, width)
        self.data = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def layer(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, Hkv, L, D] of one layer."""
        return self.data[index, 0, :rows], self.data[index, 1, :rows]

    def for_prefill(self, rows: int) -> Cache:
        """The same tensors, empty, as the cache that transformers' models append to."""
        return Cache(layers=[PrefillLayer(*self.layer(i, rows)) for i in range(len(self.data))])

    def bytes_a_slot(self, rows: int) -> int:
        """Bytes that one layer's attention reads for each slot in use."""
        heads, width = self.data.shape[3], self.data.shape[5]
        return 2 * rows * heads * width * self.data.element_size()
