"""Runs a model on a small input of its kind, and compares what another computes from the same."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from blr.compressor.base.errors import InputError, NumericsError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.context import context_of
from blr.compressor.loading.native import quiet_transformers
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.workspace.scan import check_finite, check_product, norm

TOKENS, SAMPLES, FRAMES = 16, 8000, 3000  # of a text, a sound, a spectrum
NO_CHECK = "--no-check commits without having run anything"


@dataclass(frozen=True)
class Trial:
    """An input and what a model makes of it; `what` describes the input in words."""

    inputs: Mapping[str, object]
    expected: Tensor
    what: str

    def distance(self, model: PreTrainedModel, where: object) -> float:
        """Relative distance of the results of `model` from those expected, or NumericsError."""
        found, keep = run(model, self.inputs), self.expected.isfinite()
        if found.shape != self.expected.shape or not found[keep].isfinite().all():
            raise NumericsError(
                f"{where}: found NaN or Inf in the results for {self.what}, where the model it was made "
                f"from has finite numbers; choose another dtype or a lower --cf ({NO_CHECK})"
            )
        missed = (found - self.expected)[keep].norm()
        return float(missed / self.expected[keep].norm().clamp_min(torch.finfo(missed.dtype).tiny))


def first_trial(model: PreTrainedModel, where: object) -> Trial:
    """Run `model` on the first of `candidates` that it takes. Raises InputError, NumericsError."""
    reason = ""
    for inputs in candidates(model):
        words = (_WORDS[n].format(t.shape[-1]) for n, t in inputs.items() if n in _WORDS)
        try:
            return trial_of(model, inputs, " and ".join(words), where)
        except Exception as error:  # whatever a model raises at what it does not take
            raise_exhausted(error)
            reason = reason or first_line(error)  # of the plainest
    refuse_model(model, where, reason or f"no input named {model.main_input_name!r} is known")


def refuse_model(model: object, where: object, reason: str) -> NoReturn:
    """Raise InputError for a model that runs on no small input."""
    raise InputError(
        f"{where}: {type(model).__name__} does not run on a small input ({quote(reason, 160)[1:-1]}); "
        f"expected results to compare with; {NO_CHECK}"
    )


def trial_of(model: PreTrainedModel, inputs: Mapping[str, object], what: str, where: object) -> Trial:
    """Run `model` on `inputs`, which are `what`. Raises NumericsError for no finite result."""
    expected = run(model, inputs)
    if not bool(expected.isfinite().any()):
        raise NumericsError(
            f"{where}: the model computes nothing finite; repair its weights ({NO_CHECK})"
        )
    return Trial(inputs, expected, what)


@torch.no_grad()
def run(model: PreTrainedModel, inputs: Mapping[str, object]) -> Tensor:
    """The first floating-point result of a forward pass, in float32."""
    given = {name: _cast(value, model) for name, value in inputs.items()}
    if hasattr(model.config, "return_dict"):
        model.config.return_dict = True  # a configuration may say that parts of it give tuples
    with quiet_transformers():
        result = model(**given, return_dict=True)
    return next(t for t in result.to_tuple() if isinstance(t, Tensor) and t.is_floating_point()).float()


def candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Inputs that a model of its kind might take, the plainest first."""
    taken = inspect.signature(model.forward).parameters
    made = {name: make(model) for name, make in _MAKERS.items() if name in taken}
    known = {name: value for name, value in made.items() if value is not None}
    main = model.main_input_name
    if main in known:
        plain = {main: known[main]}
        if "decoder_input_ids" in known and model.config.is_encoder_decoder:
            plain["decoder_input_ids"] = known["decoder_input_ids"]
        yield plain
        if main == "input_ids":
            yield {main: known[main][:, None]}  # one choice of several
    if len(known) > 1:
        yield known


def _tokens(model: PreTrainedModel) -> Tensor | None:
    """Up to `TOKENS` random ids [1, n], none of them special but an end of text."""
    text = model.config.get_text_config()
    size = getattr(text, "vocab_size", None)
    if size is None:
        return None
    usable = plain_tokens(model.config)
    length = min(TOKENS, max(context_of(text.to_dict()) // 2, 1))
    drawn = torch.randint(len(usable), (1, length), generator=_generator())
    ids = usable[drawn]
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[:, -1] = end
    return ids


def plain_tokens(config: PreTrainedConfig) -> Tensor:
    """The first 65,536 ids [n] of a vocabulary at most, without special ones and images."""
    text = config.get_text_config()
    told = {**config.to_dict(), **text.to_dict()}
    ends = ("_token_id", "_token_index")
    named = {v for k, v in told.items() if k.endswith(ends) and isinstance(v, int)}
    return torch.tensor([n for n in range(min(text.vocab_size, 1 << 16)) if n not in named] or [0])


def _image(model: PreTrainedModel) -> Tensor | None:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None)
    if size is None and model.main_input_name != "pixel_values":
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size or (224, 224))
    return torch.randn(1, getattr(config, "num_channels", 3), *sides, generator=_generator())


def _spectrum(model: PreTrainedModel) -> Tensor:
    bands = getattr(model.config, "num_mel_bins", 80)
    frames = 2 * getattr(model.config, "max_source_positions", FRAMES // 2)
    return torch.randn(1, bands, frames, generator=_generator())


_MAKERS = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _image,
    "input_values": lambda model: torch.randn(1, SAMPLES, generator=_generator()),
    "input_features": _spectrum,
}
_WORDS = {"input_ids": "{} tokens", "pixel_values": "an image"}
_WORDS |= {"input_values": "a sound", "input_features": "a spectrum"}


def _cast(value: object, model: PreTrainedModel) -> object:
    if isinstance(value, dict):
        return {name: _cast(inner, model) for name, inner in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(model.dtype)
    return value


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def check_model(model: nn.Module, where: object) -> None:
    """Raise NumericsError for a tensor that is not finite, or a structured layer whose factors multiply
    to values beyond its dtype. `where` names the checkpoint."""
    for name, tensor in _stored(model):
        check_finite(tensor, f"{where}: tensor {name!r}", f"in {tensor.dtype}")
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            check_layer(f"{where}: layer {name!r}", layer)


def check_layer(name: str, layer: StructuredLinear) -> None:
    """`check_product` of a structured layer in the dtype it computes in."""
    held = {part: layer.factor(part) for part in layer.held}
    norms = [norm(held[factor]) for factor in layer.spec.shapes()]
    check_product(name, layer.spec, norms, lambda: held, layer.like().dtype)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers: others, as masks, may hold -inf."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
