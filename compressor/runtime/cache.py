"""The key/value cache: static tensors that both the decoding kernels and transformers write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from blr.compressor.runtime.modes import CACHES
from blr.kernels.decode.attention.reference import pack, unpack

WHOLE, INT8 = CACHES


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


class PackedLayer(PrefillLayer):
    """The same over int8. The tokens that come are read as they are kept, so that results do not depend
    on where one prompt's chunks begin.

    keys, values: [B, Hkv, L, D] in int8; scales: [B, Hkv, L] of each.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(keys, values)
        self.scales, self.dtype = scales, dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, D] each; returns all slots in use, unpacked."""
        start, end = self.length, self.length + key_states.shape[-2]
        found = []
        for new, held, scale in zip(
            (key_states, value_states), (self.keys, self.values), self.scales, strict=True
        ):
            new = new if type(new) is Tensor else torch.cat((new,))  # of ranks: once, whole
            held[:, :, start:end], scale[:, :, start:end] = pack(new)
            found.append(unpack(held[:, :, :end], scale[:, :, :end], self.dtype))
        self.length = end
        return found[0], found[1]


class StaticKV:
    """Keys and values of all layers: [layers, 2, B, Hkv, L, D] in one allocation, zeros; in int8 with
    scales [layers, 2, B, Hkv, L] in float32.

    Args:
        like: of the dtype and on the device of whole keys and values. kind: one of `modes.CACHES`.
    """

    def __init__(
        self, config: Any, rows: int, context: int, width: int, like: Tensor, kind: str = WHOLE
    ) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, context, width)
        packed = kind == INT8
        self.dtype = like.dtype
        self.data = torch.zeros(shape, dtype=torch.int8 if packed else like.dtype, device=like.device)
        scales = torch.zeros(shape[:-1], dtype=torch.float32, device=like.device) if packed else None
        self.scale_data = scales

    def layer(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, Hkv, L, D] of one layer."""
        return self.data[index, 0, :rows], self.data[index, 1, :rows]

    def scales(self, index: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """Scales [rows, Hkv, L] of one layer's keys and values; None if they are whole."""
        scales = self.scale_data
        return None if scales is None else (scales[index, 0, :rows], scales[index, 1, :rows])

    def for_prefill(self, rows: int) -> Cache:
        """The same tensors, empty, as the cache that transformers' models append to."""
        return Cache(layers=[self._prefill(index, rows) for index in range(len(self.data))])

    def bytes_a_slot(self, rows: int) -> int:
        """Bytes that one layer's attention reads for each slot in use."""
        heads, width = self.data.shape[3], self.data.shape[5]
        scale = 0 if self.scale_data is None else self.scale_data.element_size()
        return 2 * rows * heads * (width * self.data.element_size() + scale)

    def _prefill(self, index: int, rows: int) -> PrefillLayer:
        held, scales = self.layer(index, rows), self.scales(index, rows)
        return PrefillLayer(*held) if scales is None else PackedLayer(*held, scales, self.dtype)
