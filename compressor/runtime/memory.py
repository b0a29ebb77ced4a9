"""The memory of a decoder: buffers, cache, rotary tables, tokens and positions, all on one device."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blr.compressor.runtime.cache import WHOLE, StaticKV
from blr.compressor.runtime.plan import Plan, Slot
from blr.kernels.decode.attention.launch import attention_workspace
from blr.kernels.decode.quantized.formats import GROUP

# Logits that one program of the choice compares.
CHOICE_BLOCK = 4096
# Slots of the shortest context that kernels are launched for.
MIN_BUCKET = 128


class State:
    """What phases read and write, for up to `batch` rows of up to `context` slots.

    Args:
        kind: of the cache, one of `modes.CACHES`.

    Attributes:
        tokens: [batch] int64, the tokens that the next step feeds; it leaves the next ones there.
        pos: [batch] int64, the slot of those tokens. start: [batch] int64, first slot in use.
        cos, sin: [context, R] in float32, by the model's own rotary embedding.
        kv: the cache. attention, choice, workspace: of kernels.
        operands: twins in the model's dtype of buffers that only products read, for several rows.
    """

    def __init__(self, model: Any, plan: Plan, batch: int, context: int, kind: str = WHOLE) -> None:
        device, config = model.device, model.config
        self.buffers = {
            name: torch.zeros(batch, width, dtype=buffer_dtype(name, model.dtype), device=device)
            for name, width in plan.buffers.items()
        }
        self.operands = {
            name: torch.zeros(*(batch, -(-width // GROUP) * GROUP), dtype=model.dtype, device=device)
            for name, width in plan.buffers.items()
            if name in ("heads", "inner") or (name[:1] == "z" and name[1:].isdigit())
        }
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.pos = torch.zeros(batch, dtype=torch.int64, device=device)
        self.start = torch.zeros(batch, dtype=torch.int64, device=device)
        self.cos, self.sin = rotary_tables(model, context)
        width = next(phase.heads.width for phase in plan.phases if phase.heads)
        self.kv = StaticKV(config, batch, context, width, model.get_input_embeddings().weight, kind)
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.attention = attention_workspace(batch, *heads, width, device)
        parts = 1 << (-(-config.vocab_size // CHOICE_BLOCK) - 1).bit_length()
        self.choice = {
            "values": torch.zeros(batch, parts, dtype=torch.float32, device=device),
            "indices": torch.zeros(batch, parts, dtype=torch.int32, device=device),
            "counter": torch.zeros(batch, dtype=torch.int32, device=device),
        }

    @cached_property
    def workspace(self) -> Any:
        """Of products of several rows."""
        from blr.kernels.decode.skinny.launch import Workspace

        return Workspace()

    def view(self, slot: Slot, rows: int, half: bool = False) -> Tensor:
        """[rows, width] of a buffer. half: of its twin in the model's dtype, if it has one."""
        buffers = self.operands if half and slot.name in self.operands else self.buffers
        return buffers[slot.name][:rows, slot.start : slot.start + slot.width]


def buffer_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """float32, but for the activations inside the MLP: the widest input, so read in the model's own."""
    return dtype if name == "inner" else torch.float32


def rotary_tables(model: Any, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin [context, R] in float32 of every position, by the model's rotary module."""
    position = torch.arange(context, device=model.device)[None]
    like = torch.zeros(1, 1, dtype=torch.float32, device=model.device)
    with torch.no_grad():
        cos, sin = model.get_decoder().rotary_emb(like, position)
    return cos[0].contiguous(), sin[0].contiguous()


def bucket_of(slots: int) -> int:
    """The power of two at or above, `MIN_BUCKET` at least: contexts of one bucket share launches."""
    return max(MIN_BUCKET, 1 << (slots - 1).bit_length())
