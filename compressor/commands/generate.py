"""Continues a prompt with a decoder, and measures where the time of a token goes."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import BlrError, CapabilityError, InputError, UsageError
from blr.compressor.base.quoting import first_line, is_text, quote
from blr.compressor.base.tables import aligned
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import context_of
from blr.compressor.loading.tokenizer import check_ids, encode_prompt
from blr.compressor.modeling.cache_key import Check
from blr.compressor.modeling.generation import held_decoder, obstacle, unusual_settings
from blr.compressor.modeling.settings import export_settings
from blr.compressor.recipe.settings import GenerateSettings
from blr.compressor.runtime.decoder import Decoder, average
from blr.compressor.runtime.failures import DecoderError
from blr.compressor.runtime.phases import supports
from blr.compressor.runtime.sampling import check_logits

MAX_CONTEXT = 8192  # tokens that the cache of a profiled model without export settings has room for


@dataclass(frozen=True)
class Generation:
    """`text` continues `prompt` by `tokens` tokens, produced in `seconds` (prefill included)."""

    prompt: str
    text: str
    tokens: int
    seconds: float


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    sampling: GenerateSettings,
    stream: TextIO | None = None,
) -> Generation:
    """Generate a continuation, and write it to `stream` as it comes. Raises UsageError for an empty
    prompt, CapabilityError for one too long, NumericsError for logits that choose no token."""
    inputs = encode_prompt(tokenizer, _text(prompt), model)
    length = inputs["input_ids"].shape[1]
    context = context_of(model.config.to_dict())
    if length == 0:
        raise UsageError("the prompt has no tokens; give some text to continue")
    if length + sampling.max_new_tokens > context:
        found = f"{length} prompt tokens and {sampling.max_new_tokens} new ones"
        said = f"{found} exceed the model's context of {context}"
        raise CapabilityError(f"{said}; shorten the prompt or lower --max-new-tokens")
    check_ids(model, inputs["input_ids"])
    torch.manual_seed(sampling.seed)
    started = monotonic()
    with model.register_forward_hook(_LogitsCheck()):
        ids = _generated(model, {**inputs, **_arguments(model, sampling, tokenizer, stream)})[0]
    text = str(tokenizer.decode(ids[length:], skip_special_tokens=True))
    if stream is not None and not _streams(model, sampling):
        stream.write(f"{tokenizer.decode(ids, skip_special_tokens=True)}\n")
    return Generation(prompt, text, len(ids) - length, monotonic() - started)


def _text(prompt: str) -> str:
    """`prompt`, with bytes that the locale lacks read as UTF-8. Raises UsageError for other bytes."""
    if is_text(prompt):
        return prompt
    try:
        return os.fsencode(prompt).decode("utf-8")
    except ValueError:
        raise UsageError(f"prompt {quote(prompt)}: found bytes that are no UTF-8; give text") from None


def _generated(model: Any, arguments: dict[str, object]) -> torch.Tensor:
    """Token ids [1, T + new]. Raises InputError if the model's defaults ask for the impossible,
    CapabilityError for what the runtime refuses."""
    try:
        return model.generate(**arguments)
    except DecoderError as error:
        raise CapabilityError(str(error)) from error
    except Exception as error:  # transformers raises any kind for settings that do not fit together
        odd = sorted(unusual_settings(model.generation_config))
        if isinstance(error, BlrError | MemoryError | torch.OutOfMemoryError) or not odd:
            raise
        reason = quote(first_line(error), 160)[1:-1]
        raise InputError(
            f"generation_config.json: found {', '.join(odd)}, with which this model does not generate "
            f"({reason}); expected settings of plain decoding; remove them"
        ) from error


class _LogitsCheck(Check):
    """Raises NumericsError in a forward pass whose logits choose no token."""

    def __call__(self, _: object, __: object, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output.logits
        check_logits(logits[:, -1])


@dataclass(frozen=True)
class PhaseTime:
    """A step of a token, over all layers: its time, and the bytes that it reads."""

    name: str
    microseconds: float
    bytes: int


@dataclass(frozen=True)
class Profile:
    """Decoding of one sequence: bytes of weights and cache read for a token, bytes a second of a copy,
    and the `fraction` of these that decoding reaches."""

    tokens_per_second: float
    bytes_a_token: int
    copy_bandwidth: float
    fraction: float
    stages: list[PhaseTime]


def default_dtype(folder: Path, device: str) -> str:
    """The dtype to compute in when none is asked for: float32; for an export on a GPU, as stored."""
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


def profile(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, steps: int = 20
) -> Profile:
    """Time the stages of the tokens behind `prompt`. Raises CapabilityError."""
    settings = export_settings(model.config)
    found = obstacle(model.device) or supports(model)
    try:
        if settings is not None and found is None:
            found = held_decoder(model, settings)
        if isinstance(found, str):
            raise CapabilityError(f"no fused runtime for this model: {found}; leave --profile out")
        context = min(context_of(model.config.to_dict()), MAX_CONTEXT)
        decoder = found or Decoder(model, batch=1, context=context)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        decoder.prefill(ids.to(model.device))
        *stages, token = [PhaseTime(*stage) for stage in decoder.profile(steps)]
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
    rows = [(s.name, f"{s.microseconds:.2f} us", f"{s.bytes:,} bytes") for s in found.stages]
    return aligned([whole, *rows], numbers=(1, 2))


def copy_bandwidth(device: torch.device, size: int = 1 << 30, repeats: int = 10) -> float:
    """Bytes read and written a second by copies of `size` bytes on a GPU."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / average(lambda: target.copy_(source), repeats, device)


def _streams(model: PreTrainedModel, sampling: GenerateSettings) -> bool:
    """Whether tokens are final as they come, as without beams and assistants."""
    config = copy.deepcopy(model.generation_config)
    config.do_sample = sampling.temperature > 0
    return config.get_generation_mode() in ("greedy_search", "sample")


def _arguments(
    model: PreTrainedModel,
    sampling: GenerateSettings,
    tokenizer: PreTrainedTokenizerBase,
    stream: TextIO | None,
) -> dict[str, object]:
    # one sequence of tokens is the result, whatever else the model's defaults ask for
    plain = {"return_dict_in_generate": False, "num_return_sequences": 1}
    defaults = model.generation_config
    arguments: dict[str, object] = {
        **{name: value for name, value in plain.items() if getattr(defaults, name, None)},
        **({"tokenizer": tokenizer} if getattr(defaults, "stop_strings", None) else {}),
        **{"max_new_tokens": sampling.max_new_tokens, "do_sample": False},
    }
    if sampling.temperature > 0:
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        arguments |= {**chosen, "top_p": sampling.top_p or 1.0, "do_sample": True}
    if stream is not None and _streams(model, sampling):
        arguments["streamer"] = streamer = _Streamer(tokenizer, skip_special_tokens=True)
        streamer.stream = stream
    return arguments


class _Streamer(TextStreamer):
    """Writes to its `stream`, where transformers' class keeps the standard output of its import."""

    stream: TextIO

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.stream.write(text + ("\n" if stream_end else ""))
        self.stream.flush()
