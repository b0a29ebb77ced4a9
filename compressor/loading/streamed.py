"""A model of which one block at a time is in memory: weights are read when a block is about to run.

Made and filled by transformers' own loader, part by part, so that renamed tensors and experts that are
merged arrive as in any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import blr.compressor.modeling  # noqa: F401  (registers the structured model types)
from blr.compressor.checkpoint.source import TORCH_NAMES, Source, open_source
from blr.compressor.loading.native import decoded, native_errors
from blr.compressor.loading.quiet import quiet_transformers
from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.exported import model_class
from blr.compressor.modeling.registry import auto_classes

LISTS = nn.ModuleList, nn.Sequential
WHOLE = 1 << 28  # bytes of weights that are loaded at once, as a user would; beyond, block by block


def streamed_model(source: Source) -> Any:
    """The model in `source`, dense or ours, in evaluation mode on the CPU and as stored: the weights of
    a block are there while it runs, all others always.

    Raises InputError for a configuration that it cannot be built from.
    """
    parts = Parts(source)
    model = parts.model
    with native_errors(source), quiet_transformers():
        parts.fill("")
        parts.make_buffers()
        model.tie_weights()
    for name, block in parts.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: parts.fill(name))
        block.register_forward_hook(lambda *_, name=name: parts.drop(name))
    return model


def empty_model(source: Source) -> Any:
    """The model in `source`, dense or ours, all of it on the meta device."""
    meta = {
        name: torch.empty(entry.shape, dtype=_dtype(entry.dtype), device="meta")
        for name, entry in source.entries.items()
    }
    cls, config = _made_of(source)
    return cls.from_pretrained(None, config=config, state_dict=meta, device_map="meta").eval()


def load_written(folder: Path) -> Any:
    """The model in an output, loaded as the README says; beyond `WHOLE` bytes, block by block."""
    source = open_source(folder)
    if not is_small(source):
        return streamed_model(source)
    name = source.config["architectures"][0].removeprefix(PREFIX)
    classes = auto_classes(source.model_type.removeprefix(f"{PREFIX.lower()}_"))
    auto = next((auto for auto, names in classes.items() if name in names), None)
    if auto is None:
        return streamed_model(source)  # a class that no Auto class gives
    with quiet_transformers():
        return getattr(transformers, auto).from_pretrained(folder, local_files_only=True).eval()


def is_small(source: Source) -> bool:
    """Whether all of its weights may be in memory at once."""
    return sum(entry.nbytes for entry in source.entries.values()) <= WHOLE


def _dtype(stored: str) -> torch.dtype:
    """Of a stored tensor; any for one that torch has no bytes for, which fails when it is read."""
    return getattr(torch, TORCH_NAMES.get(stored, "float32"))


def _made_of(source: Source) -> tuple[Any, Any]:
    """The class that config.json names, or the plain one of its model type, and its configuration."""
    config = CONFIG_MAPPING[source.model_type].from_dict(decoded(source.config))
    name = (source.config.get("architectures") or [auto_classes(source.model_type)["AutoModel"][0]])[0]
    return (model_class(name) if name.startswith(PREFIX) else getattr(transformers, name)), config


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The members of the outermost lists of modules, by name."""
    lists, inside = set(), ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, LISTS):
            lists.add(name)
        elif name.rpartition(".")[0] in lists:
            inside = f"{name}."
            yield name, module


class Parts:
    """The stored tensors of a `model` by the block that they belong to; "" is what belongs to none.

    Raises InputError for a configuration that it cannot be built from.
    """

    def __init__(self, source: Source) -> None:
        with native_errors(source), quiet_transformers():
            self.model = empty_model(source)
        self.source, self.blocks = source, dict(blocks_of(self.model))
        self.transforms: Any = get_model_conversion_mapping(self.model)
        self.stored: dict[str, list[str]] = {"": [], **{name: [] for name in self.blocks}}
        self.keys: dict[str, set[str]] = {name: set() for name in self.stored}
        known = self.model.state_dict()
        for name in source.entries:
            key = self._key(name, known)
            self.stored[self._part(key)].append(name)
        for key in known:
            self.keys[self._part(key)].add(key)

    def _key(self, name: str, known: Any) -> str:
        """The name in the model of a stored tensor, or of the one that it becomes a part of."""
        renamings = [t for t in self.transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in self.transforms if isinstance(t, WeightConverter)]
        prefix = self.model.base_model_prefix
        key = rename_source_key(name, renamings, converters, prefix, known)[0]
        return key if key in known else rename_source_key(name, [], [], prefix, known)[0]

    def _part(self, key: str) -> str:
        parts = key.split(".")
        names = (".".join(parts[:n]) for n in range(1, len(parts)))
        return next((name for name in names if name in self.blocks), "")

    def fill(self, part: str) -> None:
        """Read the tensors of a part."""
        state = {n: self.source.load_tensor(self.source.entries[n]) for n in self.stored[part]}
        transforms: Any = self.transforms  # which are more than the annotation there says
        settings = LoadStateDictConfig(
            device_map={"": "cpu"}, dtype=self.model.dtype, weight_mapping=transforms
        )
        convert_and_load_state_dict_in_model(self.model, state, settings)

    def drop(self, part: str) -> None:
        """Forget them."""
        for key in self.keys[part]:
            owner, _, leaf = key.rpartition(".")
            module = self.model.get_submodule(owner)
            held = module._parameters if leaf in module._parameters else module._buffers
            empty = torch.empty_like(held[leaf], device="meta")
            held[leaf] = nn.Parameter(empty, False) if held is module._parameters else empty

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """Those of a part as transformers keeps them, by name in the model, but what is not stored."""
        self.fill(part)
        held = self.model.state_dict()
        found = {key: held[key] for key in self.keys[part] if held[key].device.type != "meta"}
        self.drop(part)
        return found

    def make_buffers(self) -> None:
        """Compute the buffers that no checkpoint stores."""
        for key, buffer in list(self.model.named_non_persistent_buffers()):
            owner, _, leaf = key.rpartition(".")
            module = self.model.get_submodule(owner)
            module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
            module._is_hf_initialized = False  # so that transformers fills it
        self.model.initialize_weights()
