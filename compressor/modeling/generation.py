"""`generate` of exported decoders: by the fused runtime where it can, else by transformers. The runtime
takes plain decoding (`requests.py`) of as many sequences and tokens as the export was made for, on an
NVIDIA GPU with Triton. Transformers answers every other call, with the same layers."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.checkpoint.context import context_of
from blr.compressor.modeling.cache_key import held_for
from blr.compressor.modeling.modeling_blr import Mixin
from blr.compressor.modeling.requests import Request, read_request
from blr.compressor.modeling.settings import ExportSettings, export_settings, warn_once
from blr.kernels.common.available import gpu_key, has_triton, kernels_on


class FusedGeneration(Mixin):
    """Mixin of exported causal language models, which decodes in the runtime."""

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *rest: object,
        **kwargs: Any,
    ) -> Any:
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


def find_decoder(model: PreTrainedModel, settings: ExportSettings, request: Request | str) -> object:
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

    def make() -> object:
        return supports(model) or _make_decoder(model, settings)

    held = held_for(model, "_blr_decoder", make, values=True)
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
    assert settings.context is not None  # as every export that generates has it
    options: dict[str, Any] = {n: getattr(settings, n) for n in ("batch", "context", "cache")}
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
