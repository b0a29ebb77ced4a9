"""Holds the memory of a decoder on one device: buffers, cache, rotary tables, tokens and positions."""

from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.runtime.failures import CACHES
from blr.compressor.runtime.plan import Columns, TokenPlan
from blr.kernels.decode.attention.launch import attention_workspace
from blr.kernels.decode.attention.rounded import pack, unpack
from blr.kernels.decode.quantized.formats import GROUP

WHOLE, INT8 = CACHES
# Logits that one program of the choice compares.
CHOICE_BLOCK = 4096
# Slots of the shortest context that kernels are launched for.
MIN_BUCKET = 128


class PrefillLayer(CacheLayerMixin):
    """A layer of transformers' cache over tensors [B, Hkv, L, D], free from `length` on."""

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
        """Do nothing: the tensors exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, Hkv, T, D] each; returns views of all slots in use."""
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.keys.shape[-2]


class PackedLayer(PrefillLayer):
    """A layer of the cache in int8. New tokens are read back as they are kept, so that results do not
    depend on where a prompt's chunks begin. keys, values: [B, Hkv, L, D]. scales: [B, Hkv, L] of
    each."""

    def __init__(
        self, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(keys, values)
        self.scales, self.dtype = scales, dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
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
    """The keys and values of all layers [layers, 2, B, Hkv, L, D] in one allocation; int8 has scales
    [layers, 2, B, Hkv, L] in float32. like: has the dtype and device of whole keys and values. kind: of
    `CACHES`."""

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: int,
        context: int,
        width: int,
        like: Tensor,
        kind: str = WHOLE,
    ) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, context, width)
        self.dtype, stored = like.dtype, torch.int8 if kind == INT8 else like.dtype
        self.data = torch.zeros(shape, dtype=stored, device=like.device)
        self.scale_data: Tensor | None = None
        if kind == INT8:
            self.scale_data = torch.zeros(shape[:-1], dtype=torch.float32, device=like.device)

    def layer(self, index: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.data[index, 0, :rows], self.data[index, 1, :rows]

    def scales(self, index: int, rows: int) -> tuple[Tensor, Tensor] | None:
        """The scales [rows, Hkv, L] of one layer's keys and values; None if they are whole."""
        scales = self.scale_data
        return None if scales is None else (scales[index, 0, :rows], scales[index, 1, :rows])

    def for_prefill(self, rows: int) -> Cache:
        """The same tensors as an empty cache that models of transformers append to."""
        layers: list[CacheLayerMixin] = []
        for index in range(len(self.data)):
            held, scales = self.layer(index, rows), self.scales(index, rows)
            packed = scales and PackedLayer(*held, scales, self.dtype)
            layers.append(packed or PrefillLayer(*held))
        return Cache(layers=[*layers])

    def bytes_a_slot(self, rows: int) -> int:
        """The bytes that one layer's attention reads for each slot in use."""
        heads, width = self.data.shape[3], self.data.shape[5]
        scale = 0 if self.scale_data is None else self.scale_data.element_size()
        return 2 * rows * heads * (width * self.data.element_size() + scale)


class DecoderState:
    """The tensors that phases read and write, for up to `batch` rows of up to `context` slots.

    Args:
        kind: of the cache, one of `CACHES`. tokens: rows of buffers, if more than `batch`. In a pass of
            several tokens of B sequences, row ``i · B + b`` has token i of sequence b.

    Attributes:
        tokens: [batch] int64, the tokens that the next step feeds; it leaves the next ones there.
        pos: [batch] int64, the slot of those tokens. start: [batch] int64, first slot in use.
        cos, sin: [context, R] in float32, by the model's own rotary embedding.
        kv: the cache. attention, choice, sums: memory of kernels.
        operands: copies in the model's dtype of buffers that only products of several rows read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: TokenPlan,
        batch: int,
        context: int,
        kind: str = WHOLE,
        tokens: int | None = None,
    ) -> None:
        device, config = model.device, model.config
        width = next(phase.heads.width for phase in plan.phases if phase.heads)
        like = cast(Tensor, model.get_input_embeddings().weight)
        self.kv = StaticKV(config, batch, context, width, like, kind)
        batch = tokens or batch
        zeros = partial(torch.zeros, device=device)
        dtypes = {"inner": model.dtype}  # the MLP's activations are the widest input; others are float32
        self.buffers = {
            name: zeros(batch, width, dtype=dtypes.get(name, torch.float32))
            for name, width in plan.buffers.items()
        }
        self.operands = {
            name: zeros(batch, -(-width // GROUP) * GROUP, dtype=model.dtype)
            for name, width in plan.buffers.items()
            if name in ("heads", "inner") or (name[:1] == "z" and name[1:].isdigit())
        }
        self.tokens, self.pos, self.start = (zeros(batch, dtype=torch.int64) for _ in range(3))
        self.cos, self.sin = rotary_tables(model, context)
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.attention = attention_workspace(batch, *heads, width, device)
        parts = 1 << (-(-config.vocab_size // CHOICE_BLOCK) - 1).bit_length()
        values = zeros(batch, parts, dtype=torch.float32)
        indices = zeros(batch, parts, dtype=torch.int32)
        self.choice = values, indices, zeros(batch, dtype=torch.int32)  # the last counts
        self.sums: list[tuple[Tensor, Tensor]] = []  # of `PartialSums`

    def view(self, slot: Columns, rows: int, half: bool = False) -> Tensor:
        """The slot [rows, width] of a buffer. half: of its copy in the model's dtype, if it has one."""
        buffers = self.operands if half and slot.name in self.operands else self.buffers
        return buffers[slot.name][:rows, slot.start : slot.start + slot.width]


def rotary_tables(model: PreTrainedModel, context: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines [context, R] in float32 of every position, by the model's rotary module."""
    position = torch.arange(context, device=model.device)[None]
    like = torch.zeros(1, 1, dtype=torch.float32, device=model.device)
    with torch.no_grad():
        rotary = model.get_decoder().rotary_emb
        tables = [table[0] for table in rotary(like, position)]
    once = tables[0].shape[1] == len(rotary.inv_freq)  # a column for both of a pair
    cos, sin = (torch.cat((t, t), 1) if once else t.contiguous() for t in tables)
    return cos, sin


def bucket_of(slots: int) -> int:
    """The next power of two, `MIN_BUCKET` at least. Contexts of one bucket share launches."""
    return max(MIN_BUCKET, 1 << (slots - 1).bit_length())
