"""The models that `blr bench memory` measures: random weights of a published shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from blr.compressor.base.errors import UsageError
from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.layers import PROJECTIONS, prepare_layers
from blr.compressor.modeling.modeling_blr import PREFIX, config_class
from blr.compressor.modeling.models import model_class
from blr.compressor.structures.specs import LowRankSpec

STEP = 16  # ranks above it are its multiples


@dataclass(frozen=True)
class Subject:
    """A base model: classes of transformers and settings of configs/bench-memory.yaml."""

    name: str
    config: str
    model: str
    settings: dict[str, Any]

    @property
    def width(self) -> int:
        """Hidden size."""
        return int(self.settings["hidden_size"])

    @property
    def gated(self) -> bool:
        """Whether it is of Llama's kind: a gated MLP, rotary embeddings, causal."""
        return self.config == "LlamaConfig"


@cache
def known_models() -> dict[str, Subject]:
    """All of configs/bench-memory.yaml by name."""
    from ruamel.yaml import YAML

    text = files("blr.configs").joinpath("bench-memory.yaml").read_text("utf-8")
    found = YAML(typ="safe").load(text)
    return {
        name: Subject(name, each["config"], each["model"], each["settings"])
        for name, each in found.items()
    }


def find_subject(name: str) -> Subject:
    """A model by name. Raises UsageError listing the known ones."""
    if name not in known_models():
        raise UsageError(f"model {name!r} is not known; expected one of {', '.join(known_models())}")
    return known_models()[name]


def dense_model(subject: Subject, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model with scaled dot product attention."""
    import transformers

    config = getattr(transformers, subject.config)(**subject.settings)
    with _made_on(device, dtype):
        return getattr(transformers, subject.model)(config).eval()


def low_rank_model(
    subject: Subject, keep: float, per_head: bool, device: torch.device, dtype: torch.dtype
) -> Any:
    """The same with every linear layer of its blocks of low rank, at a share `keep` of parameters."""
    import transformers

    config = getattr(transformers, subject.config)(**subject.settings)
    with torch.device("meta"):
        native = getattr(transformers, subject.model)(config)
    table = {}
    for name, layer in native.named_modules():
        inside = any(part.isdecimal() for part in name.split("."))
        if isinstance(layer, torch.nn.Linear) and inside:
            heads = _heads(subject, name) if per_head else 1
            table[name] = rank_spec(layer.in_features, layer.out_features, keep, heads).to_dict()
    made = config_class(PREFIX + subject.config)(**subject.settings, blr={"format": 1, "layers": table})
    with _made_on(device, dtype):
        model = model_class(PREFIX + subject.model)(made).eval()
    prepare_layers(model)
    return model


def unfused(model: Any) -> Any:
    """The same weights in transformers' own modules, but for the low-rank layers."""
    made = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in made.modules():
        if isinstance(module, Extension):
            module.__class__ = module.native
    return made


def rank_spec(inputs: int, outputs: int, keep: float, groups: int) -> LowRankSpec:
    """The largest rank, a multiple of `STEP` where that leaves any, of `groups` groups of outputs."""
    rank = max(int(keep * inputs * outputs / (groups * inputs + outputs)), 1)
    return LowRankSpec(inputs, outputs, rank // STEP * STEP or rank, groups)


def _heads(subject: Subject, name: str) -> int:
    """Heads of a projection, 1 of any other layer."""
    child = name.rpartition(".")[2]
    if child not in PROJECTIONS:
        return 1
    heads: int = subject.settings["num_attention_heads"]
    grouped: int = subject.settings.get("num_key_value_heads", heads)
    return heads if child.startswith("q") else grouped


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Weights are drawn on `device` in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
