"""A model of which one block at a time is in memory: weights are read when a block is about to run. Made
and filled by transformers' own loader, part by part, so that renamed tensors and experts that are merged
arrive as in any model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.loader_names import Keys, load_empty, meta_tensors
from blr.compressor.loading.native import made_config, native_errors, quiet_transformers
from blr.compressor.modeling import register
from blr.compressor.modeling.modeling_blr import PREFIX
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_classes

LISTS = nn.ModuleList, nn.Sequential
WHOLE = 1 << 29  # bytes of weights that are loaded at once, as a user would; beyond, block by block


def streamed_model(source: Source) -> PreTrainedModel:
    """The model in `source`, dense or of blr, on the CPU as stored: a block's weights are in memory only
    while it runs. Raises InputError for a configuration that it cannot be built from."""
    parts = Parts(source)
    parts.fill_rest()
    for name, block in parts.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: parts.fill(name))
        block.register_forward_hook(lambda *_, name=name: parts.drop(name))
    return parts.model


def whole_model(source: Source) -> PreTrainedModel:
    """The same model with all weights in memory."""
    parts = Parts(source)
    parts.fill_rest()
    with quiet_transformers():
        for name in parts.blocks:
            parts.fill(name)
    return parts.model


def empty_model(source: Source) -> PreTrainedModel:
    """The model in `source`, dense or of blr, on the meta device."""
    config, name = made_config(source), source.config["architectures"][0]
    cls = model_class(name) if name.startswith(PREFIX) else getattr(transformers, name)
    tensors = meta_tensors(source.entries.values())
    return load_empty(cls, None, config=config, state_dict=tensors)[0].eval()


def load_written(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load an output as the README says, in `dtype`; beyond `WHOLE` bytes block by block, as stored."""
    register()
    source = open_source(folder)
    if not is_small(source):
        return streamed_model(source)
    name = source.config["architectures"][0].removeprefix(PREFIX)
    classes = auto_classes(source.model_type.removeprefix(f"{PREFIX.lower()}_"))
    auto = next((auto for auto, names in classes.items() if name in names), None)
    if auto is None:
        return streamed_model(source)  # a class that no Auto class gives
    with quiet_transformers():
        made = getattr(transformers, auto).from_pretrained(folder, dtype=dtype, local_files_only=True)
        return made.eval()


def is_small(source: Source) -> bool:
    return source.nbytes <= WHOLE


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
    """The stored tensors of a `model` by block, "" for those of no block. Raises InputError for a
    configuration that it cannot be built from."""

    def __init__(self, source: Source) -> None:
        with native_errors(source), quiet_transformers():
            self.model = empty_model(source)
        self.source, self.blocks = source, dict(blocks_of(self.model))
        found = Keys(self.model)
        self.transforms = found.transforms
        self.stored: dict[str, list[str]] = {"": [], **{name: [] for name in self.blocks}}
        self.keys: dict[str, set[str]] = {name: set() for name in self.stored}
        self.missing = set(found.known)  # what no stored tensor becomes
        for name in source.entries:
            key = found.key(name)
            self.missing.discard(key)
            self.stored[self._part(key)].append(name)
        for key in found.known:
            self.keys[self._part(key)].add(key)

    def _part(self, key: str) -> str:
        parts = key.split(".")
        names = (".".join(parts[:n]) for n in range(1, len(parts)))
        return next((name for name in names if name in self.blocks), "")

    def fill(self, part: str) -> None:
        state = {n: self.source.load_tensor(self.source.entries[n]) for n in self.stored[part]}
        settings = LoadStateDictConfig(
            device_map={"": "cpu"}, dtype=self.model.dtype, weight_mapping=self.transforms
        )
        convert_and_load_state_dict_in_model(self.model, state, settings)

    def fill_rest(self) -> None:
        """Read what belongs to no block, make the buffers, and tie weights that are not stored apart."""
        with native_errors(self.source), quiet_transformers():
            self.fill("")
            for key, buffer in list(self.model.named_non_persistent_buffers()):
                owner, _, leaf = key.rpartition(".")
                module: Any = self.model.get_submodule(owner)
                module._buffers[leaf] = torch.empty_like(buffer, device="cpu")
                module._is_hf_initialized = False  # so that transformers fills it
            self.model.initialize_weights()
            self.model.tie_weights(missing_keys=set(self.missing), recompute_mapping=False)

    def drop(self, part: str) -> None:
        for key in self.keys[part]:
            owner, _, leaf = key.rpartition(".")
            module: Any = self.model.get_submodule(owner)
            held = module._parameters if leaf in module._parameters else module._buffers
            empty = torch.empty_like(held[leaf], device="meta")
            held[leaf] = nn.Parameter(empty, False) if held is module._parameters else empty

    def tensors(self, part: str) -> dict[str, torch.Tensor]:
        """The stored tensors of a part by their names in the model."""
        self.fill(part)
        held = self.model.state_dict()
        found = {key: held[key] for key in self.keys[part] if held[key].device.type != "meta"}
        self.drop(part)
        return found
