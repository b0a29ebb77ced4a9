"""Takes prompts through the model's own modules, in chunks, into the static cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.compressor.modeling.float8 import is_float8
from blr.compressor.runtime.failures import BatchError

CHUNK = 512  # tokens of a row that pass through the layers together
WIDE = 2048  # where products are in float8, which fewer tokens do not fill (scripts/LOG.md)


def left_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A prompt [B, T] with the padding of every row on its left, and its lengths [B].

    Raises BatchError for a mask of another shape, an empty row, or a hole inside a row.
    """
    if attention_mask is None:
        return input_ids, None
    if attention_mask.shape != input_ids.shape:
        found, expected = list(attention_mask.shape), list(input_ids.shape)
        raise BatchError(f"an attention mask of shape {found}: expected that of the prompt, {expected}")
    mask = attention_mask.bool()
    lengths = mask.sum(-1)
    first = mask.int().argmax(-1)
    slot = torch.arange(mask.shape[1], device=mask.device)
    runs = (slot >= first[:, None]) & (slot < (first + lengths)[:, None])
    if not torch.equal(runs, mask) or bool((lengths == 0).any()):
        raise BatchError("an attention mask with holes or empty rows: expected padding at the ends only")
    shift = mask.shape[1] - lengths - first  # to the right
    rolled = (slot - shift[:, None]) % mask.shape[1]
    return input_ids.gather(1, rolled), lengths


def prefill_chunks(model: Any, input_ids: Tensor, start: Tensor, cache: Any) -> Tensor:
    """Pass [B, T] tokens through the layers; the cache takes their keys and values.

    Args:
        start: [B] on the CPU, the first slot of each row that is not padding.

    Returns:
        [B, H], the normalized hidden states of the last slot.
    """
    length, base = input_ids.shape[1], model.get_decoder()
    slot = torch.arange(length, device=input_ids.device)
    padding = start.to(input_ids.device)[:, None] if int(start.max()) > 0 else None
    hidden: Any = None
    step = WIDE if input_ids.is_cuda and any(map(is_float8, base.modules())) else CHUNK
    for begin in range(0, length, step):
        end = min(begin + step, length)
        positions, mask = slot[None, begin:end], None
        if padding is not None:
            positions = (positions - padding).clamp_min(0)
            mask = (slot[None, :end] >= padding).long()
        hidden = base(
            input_ids=input_ids[:, begin:end],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    return hidden[:, -1]
