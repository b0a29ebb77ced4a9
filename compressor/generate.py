"""Continues a prompt with a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any, TextIO

import torch

from blr.compressor.errors import UsageError


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

    Raises UsageError for a prompt that is empty or leaves no room in the model's context.
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    context = getattr(model.config, "max_position_embeddings", None)
    if length == 0:
        raise UsageError("the prompt has no tokens; give some text to continue")
    if context is not None and length + sampling.max_new_tokens > context:
        raise UsageError(
            f"{length} prompt tokens and {sampling.max_new_tokens} new ones exceed the model's context "
            f"of {context}; shorten the prompt or lower --max-new-tokens"
        )
    torch.manual_seed(sampling.seed)
    started = monotonic()
    ids = model.generate(**inputs, **_arguments(sampling, tokenizer, stream))[0, length:]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Generation(prompt, text, len(ids), monotonic() - started)


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
