"""`generate` of exported decoders: by the fused runtime where it can, else by transformers. The runtime
takes plain decoding on a GPU with Triton: greedy, or by temperature, top-k and top-p, of token ids
padded on the left, of as many sequences and tokens as the export was made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.checkpoint.context import context_of
from blr.compressor.modeling.cache_key import held_for
from blr.compressor.modeling.modeling_blr import Mixin
from blr.compressor.modeling.settings import ExportSettings, export_settings, warn_once
from blr.kernels.common.available import gpu_key, has_triton, kernels_on
from blr.kernels.common.mode import setting

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


def _ids(value: Tensor | list[int] | int | None) -> tuple[int, ...]:
    listed = value.tolist() if isinstance(value, Tensor) else value
    return () if listed is None else tuple(listed if isinstance(listed, list | tuple) else [int(listed)])


class FusedGeneration(Mixin):
    """Mixin of exported causal language models, which decodes in the runtime."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *rest: object,
        **kwargs: Any,
    ) -> object:
        """Generate with the arguments and the result of `transformers.GenerationMixin.generate`. Raises
        ValueError when prompt and new tokens exceed the model's own maximum."""
        settings = export_settings(self.config)
        request: Request | str = "positional arguments"
        if settings is not None and not rest:
            request = read_request(self, inputs, generation_config, kwargs)
        decoder = None if settings is None else find_decoder(self, settings, request)
        if decoder is None or isinstance(request, str):
            return super().generate(inputs, generation_config, *rest, **kwargs)
        return _decode(decoder, request, kwargs.get("streamer"))


def find_decoder(model: PreTrainedModel, settings: ExportSettings, request: Request | str) -> Any:
    """The runtime for `request`; None when transformers is to answer, of which a warning says once why.
    Raises ValueError for more tokens than the model has positions."""
    if isinstance(request, Request):
        limit = context_of(model.config.to_dict())
        if request.length + request.new_tokens > limit:
            raise ValueError(
                f"{request.length} prompt tokens and {request.new_tokens} new ones exceed the {limit} "
                "positions of the model; shorten the prompt or lower max_new_tokens"
            )
    if model.training:
        return None
    reason = obstacle(model.device) or _excess(settings, request)
    if reason is None:
        found = held_decoder(model, settings)
        if not isinstance(found, str):
            return found
        reason = found
    warn_once(f"{reason}: generating with transformers instead of the fused runtime")
    return None


def held_decoder(model: PreTrainedModel, settings: ExportSettings) -> Any:
    """The decoder of `model`, remade when the model changes, or a text why there is none."""
    from blr.compressor.runtime.phases import supports

    held = held_for(
        model, "_blr_decoder", lambda: supports(model) or _make_decoder(model, settings), values=True
    )
    if held.basis.is_watched(model):
        return "a hook on one of its modules, or a forward put in place of its own"
    here = gpu_key(model.device)
    if not isinstance(held.made, str) and here != settings.gpu.replace("-", ""):
        warn_once(f"exported for {settings.gpu}, running on {here}: right, but perhaps not as fast")
    return held.made


def obstacle(device: torch.device) -> str | None:
    """Why this machine cannot run the fused runtime."""
    if device.type != "cuda":
        return "the model is not on a GPU"
    if not has_triton():
        return "triton is not installed"
    needed = "an NVIDIA GPU of capability 8.0 or later, and BLR_KERNELS not torch"
    return None if kernels_on(device) else f"no kernels run here ({needed})"


def _excess(settings: ExportSettings, request: Request | str) -> str | None:
    """What a request asks for beyond what the export was made for; None if nothing."""
    if isinstance(request, str):
        return f"not plain decoding ({request})"
    batch, tokens = request.ids.shape[0], request.ids.shape[1] + request.new_tokens
    if batch > settings.batch:
        return f"{batch} sequences, exported for {settings.batch}"
    if settings.context is None or tokens > settings.context:
        return f"{tokens} tokens, exported for a context of {settings.context}"
    return None


def _make_decoder(model: PreTrainedModel, settings: ExportSettings) -> object:
    from blr.compressor.runtime.failures import MODES

    assert settings.context is not None  # as every export that generates has it
    options = {n: getattr(settings, n) for n in ("batch", "context", "cache")}
    options["mode"] = setting("BLR_DECODE", MODES)
    if settings.draft is None:
        from blr.compressor.runtime.decoder import Decoder

        return Decoder(model, **options)
    from blr.compressor.runtime.drafted import make_drafted

    return make_drafted(model, settings.draft, options)


def _decode(decoder: Any, request: Request, streamer: BaseStreamer | None) -> Tensor:
    """The prompts and what follows [B, T + new], rows filled up after their end."""
    if streamer is not None:
        streamer.put(request.ids.cpu())
    # the next number of torch's generator, so that sampling follows `manual_seed`
    seed = int(torch.randint(2**31, ())) if request.temperature > 0 else 0
    rows = decoder.generate(
        request.ids,
        request.mask,
        max_new_tokens=request.new_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=seed,
        stop_ids=request.stop_ids,
        on_token=None if streamer is None else lambda row, token: streamer.put(torch.tensor([token])),
    )
    if streamer is not None:
        streamer.end()
    longest = max(map(len, rows))
    padded = [row + [request.pad_id] * (longest - len(row)) for row in rows]
    return torch.cat([request.ids, torch.tensor(padded).to(request.ids)], dim=1)
