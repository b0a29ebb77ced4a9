"""Continues a prompt with a decoder, and measures where the time of a token goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

import torch

from blr.compressor.checkpoint.source import read_config
from blr.compressor.errors import CapabilityError, UsageError
from blr.compressor.factorize import pick_device

MAX_CONTEXT = 8192  # tokens that the cache of a profiled model without export settings has room for


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy decoding."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """`text` continues `prompt` by `tokens` tokens, produced in `seconds` (prefill included)."""

    prompt: str
    text: str
    tokens: int
    seconds: float


def generate(
    model: Any, tokenizer: Any, prompt: str, sampling: Sampling, stream: TextIO | None = None
) -> Generation:
    """Generate and, if `stream` is given, write the text there as it is produced.

    Raises:
        UsageError: a prompt without tokens.
        CapabilityError: one that leaves no room in the model's context.
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    context = getattr(model.config, "max_position_embeddings", None)
    if length == 0:
        raise UsageError("the prompt has no tokens; give some text to continue")
    if context is not None and length + sampling.max_new_tokens > context:
        raise CapabilityError(
            f"{length} prompt tokens and {sampling.max_new_tokens} new ones exceed the model's context "
            f"of {context}; shorten the prompt or lower --max-new-tokens"
        )
    torch.manual_seed(sampling.seed)
    started = monotonic()
    ids = model.generate(**inputs, **_arguments(sampling, tokenizer, stream))[0, length:]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Generation(prompt, text, len(ids), monotonic() - started)


@dataclass(frozen=True)
class Stage:
    """A step of a token, of all layers' like steps one: its time and the weights and cache it reads."""

    name: str
    microseconds: float
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Decoding by the fused runtime, one sequence.

    `bytes_a_token` are the weights and cache that a token reads; `copy_bandwidth` is what a copy on
    this GPU reaches, in bytes read and written a second, and `fraction` what decoding has of it.
    """

    tokens_per_second: float
    bytes_a_token: int
    copy_bandwidth: float
    fraction: float
    stages: list[Stage]


def default_dtype(folder: Path, device: str) -> str:
    """The dtype to compute in when none is asked for: float32; for an export on a GPU, as stored.

    Raises InputError, CapabilityError.
    """
    config = read_config(folder)
    table = config.get("blr")
    stored = config.get("dtype") or config.get("torch_dtype")
    exported = isinstance(table, dict) and "export" in table
    if exported and stored in ("bfloat16", "float16") and pick_device(device).type == "cuda":
        return stored
    return "float32"


def check_profile(device: str) -> None:
    """Raise CapabilityError where there is nothing to profile on."""
    found = pick_device(device)
    if found.type != "cuda":
        raise CapabilityError(f"device {str(found)!r}: a profile needs a CUDA GPU; leave --profile out")


def profile(model: Any, tokenizer: Any, prompt: str, steps: int = 20) -> Profile:
    """Time the stages of the tokens that follow `prompt`.

    Raises CapabilityError for a model or a prompt that the fused runtime does not take.
    """
    from blr.compressor.runtime.failures import DecoderError

    decoder = _decoder(model)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    try:
        decoder.prefill(ids.to(model.device))
        *stages, token = [Stage(*stage) for stage in decoder.profile(steps)]
    except DecoderError as error:
        raise CapabilityError(f"no profile: {error}") from error
    bandwidth = copy_bandwidth(model.device)
    seconds = token.microseconds / 1e6
    return Profile(1 / seconds, token.bytes, bandwidth, token.bytes / seconds / bandwidth, stages)


def profile_text(found: Profile) -> str:
    """A line for the whole and a table of the stages."""
    whole = (
        f"{found.tokens_per_second:.1f} tokens/s, {found.bytes_a_token:,} bytes a token, "
        f"{found.fraction:.1%} of the measured copy bandwidth ({found.copy_bandwidth / 1e12:.2f} TB/s)"
    )
    width = max(len(stage.name) for stage in found.stages)
    rows = (f"{s.name.ljust(width)} {s.microseconds:9.2f} us {s.bytes:14,} bytes" for s in found.stages)
    return "\n".join([whole, *rows])


def copy_bandwidth(device: torch.device, size: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes read and written a second by copies of `size` bytes on a GPU."""
    from blr.compressor.runtime.profile import average

    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / average(lambda: target.copy_(source), repeats, device)


def _decoder(model: Any) -> Any:
    """The decoder that an export generates with, one for a single sequence for any other model."""
    from blr.compressor.modeling.fused import held_decoder, obstacle
    from blr.compressor.modeling.settings import export_settings
    from blr.compressor.runtime.decoder import Decoder
    from blr.compressor.runtime.plan import supports

    settings = export_settings(model.config)
    limit = getattr(model.config, "max_position_embeddings", MAX_CONTEXT)
    if reason := obstacle(model.device) or supports(model):
        raise CapabilityError(f"no fused runtime for this model: {reason}; leave --profile out")
    if settings is not None:
        return held_decoder(model, settings)
    return Decoder(model, batch=1, context=min(limit, MAX_CONTEXT))


def _arguments(sampling: Sampling, tokenizer: Any, stream: TextIO | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "do_sample": False}
    if sampling.temperature > 0:
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        arguments |= {**chosen, "top_p": sampling.top_p or 1.0, "do_sample": True}
    if stream is not None:
        arguments["streamer"] = _streamer(tokenizer, stream)
    return arguments


def _streamer(tokenizer: Any, stream: TextIO) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Writes to `stream` rather than to whatever standard output is at import."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            stream.write(text + ("\n" if stream_end else ""))
            stream.flush()

    return Streamer(tokenizer, skip_special_tokens=True)
