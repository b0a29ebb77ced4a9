"""Reads which calls of `generate` are plain decoding, and what exactly they ask for. Plain decoding is
greedy or samples by temperature, top-k and top-p; prompts are token ids padded on the left, the result
is tokens. Every other setting of transformers makes a call unusual."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

# Of a GenerationConfig: what a `Request` holds, and what has no influence on the tokens.
FOLLOWED = {
    *("max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"),
    *("eos_token_id", "pad_token_id"),
    *("bos_token_id", "transformers_version", "_from_model_config", "_commit_hash"),
}


@dataclass(frozen=True)
class Request:
    """One plain call of `generate`: `ids` and `mask` are [B, T]. `length` counts the tokens of the
    longest prompt without its padding; a `temperature` of 0 is greedy decoding; a row is filled up with
    `pad_id` after the first of its `stop_ids`."""

    ids: Tensor
    mask: Tensor
    length: int
    new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def read_request(
    model: Any, inputs: Tensor | None, config: GenerationConfig | None, kwargs: Mapping[str, object]
) -> Request | str:
    """Read a call ``model.generate(inputs, config, **kwargs)``; a text says what is unusual in it."""
    kwargs = dict(kwargs)
    streamer = kwargs.pop("streamer", None)
    lengths = kwargs.get("max_length"), getattr(config, "max_length", None)
    default_length = all(value is None for value in (*lengths, model.generation_config.max_length))
    config, others = model._prepare_generation_config(config, **kwargs)
    others = {name: value for name, value in others.items() if value is not None}
    ids, mask = others.pop("input_ids", inputs), others.pop("attention_mask", None)
    if unusual := sorted(unusual_settings(config) | set(others)):
        return ", ".join(unusual)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or ids.device != model.device:
        return "no input_ids [batch, tokens] on the model's device"
    if streamer is not None and len(ids) > 1:
        return "a streamer of several sequences"
    mask = _inferred_mask(ids, config) if mask is None else mask
    if mask.shape != ids.shape or not _left_padded(mask):
        return "an attention mask other than padding on the left"
    new_tokens = _new_tokens(model, config, ids.shape[1], default_length)
    return _request(ids, mask, new_tokens, config) if new_tokens > 0 else "no room for a token"


def _request(ids: Tensor, mask: Tensor, new_tokens: int, config: GenerationConfig) -> Request:
    stops, pads = _ids(config.eos_token_id), _ids(config.pad_token_id)
    sampled = {}
    if config.do_sample:
        top_p = config.top_p if config.top_p is not None and config.top_p < 1 else None
        sampled = {"temperature": config.temperature, "top_k": config.top_k or None, "top_p": top_p}
    length, pad = int(mask.sum(1).max()), (pads or stops or (0,))[0]
    return Request(ids, mask, length, new_tokens, stops, pad, **sampled)


def unusual_settings(config: GenerationConfig) -> set[str]:
    """The names of settings that differ from those of plain decoding."""
    plain = GenerationConfig()
    plain.update(**plain._get_default_generation_params(), defaults_only=True)
    usual, given = plain.to_dict(), config.to_dict()
    found = {name for name in given if not _same(given[name], usual.get(name))} - FOLLOWED
    ranges = {"temperature": (config.temperature, 0), "top_p": (config.top_p, 0)}
    if config.do_sample:  # transformers says what is wrong with such a value
        found |= {name for name, (value, least) in ranges.items() if value is None or value <= least}
    return found


def _same(value: object, usual: object) -> bool:
    """Whether a setting has its usual value or none; False stands for an option that is off anyway."""
    return value is None or value == usual or (value is False and usual is None)


def _new_tokens(
    model: PreTrainedModel, config: GenerationConfig, width: int, default_length: bool
) -> int:
    """The largest number of tokens that transformers would add to prompts of `width` columns."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if not default_length:
        return config.max_length - width
    limit = getattr(model.config, "max_position_embeddings", None)
    return config.max_length if limit is None else min(config.max_length, limit - width)


def _inferred_mask(ids: Tensor, config: GenerationConfig) -> Tensor:
    """The mask that transformers makes when none is given: it hides padding but no stop tokens."""
    pads, stops = _ids(config.pad_token_id), _ids(config.eos_token_id)
    if not pads or pads[0] in stops:
        return torch.ones_like(ids)
    return ids.ne(pads[0]).long()


def _left_padded(mask: Tensor) -> bool:
    """Whether every row is zeros, then at least one one."""
    ones = mask.eq(1)
    return bool((ones | mask.eq(0)).all() & ones[:, -1].all() & (ones[:, 1:] >= ones[:, :-1]).all())


def _ids(value: Any) -> tuple[int, ...]:
    listed = value.tolist() if isinstance(value, Tensor) else value
    return () if listed is None else tuple(listed if isinstance(listed, list | tuple) else [int(listed)])
