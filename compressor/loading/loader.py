"""What transformers' own loader makes of a checkpoint: the class, its tensors, and which are one. It is
asked on the meta device. It also fills a model of which one block at a time is in memory, so that
renamed and merged tensors arrive as ever."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.native import (
    check_type,
    made_config,
    native_class,
    native_errors,
    quiet_transformers,
)
from blr.compressor.modeling import register
from blr.compressor.modeling.modeling_blr import PREFIX
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_classes

LoadingReport = Mapping[str, Iterable[str]]  # of transformers: wrong keys by kind, as "missing_keys"

REMEDY = "take config.json and weights from the same model"
TIES = ("tie_word_embeddings", "tie_embedding")  # what configurations call it
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # steps of transformers' loader
LISTS = nn.ModuleList, nn.Sequential
WHOLE = 1 << 29  # bytes of weights that are loaded at once, as a user would; beyond, block by block


def taken(source: Source) -> Source:
    """`source` as transformers reads it: `entries` by the names of its class, all other tensors in
    `left`, `config` with the class and the ties that hold. Raises InputError for an unknown class, and
    for tensors that are missing, of another shape or of blocks that config.json does not count."""
    source = source if source.config.get("architectures") else _named(source)
    cls = native_class(source)
    model, info = _loaded(source, cls)
    if found := misfit(info, "missing", "mismatched"):
        raise InputError(f"{source.folder}: {found} for {cls.__name__}; {REMEDY}")
    _refuse_blocks(source, model, info)
    keys = Keys(model)
    return _tied(_placed(source, keys), model, keys)


def _loaded(source: Source, cls: type[PreTrainedModel]) -> tuple[PreTrainedModel, LoadingReport]:
    """An empty model that was given tensors of the stored shapes and dtypes (float32 for a dtype that
    torch lacks)."""
    config, state = made_config(source), {}
    for name, entry in source.entries.items():
        dtype = getattr(torch, TORCH_NAMES.get(entry.dtype, "float32"))
        state[name] = torch.empty(entry.shape, dtype=dtype, device="meta")
    with native_errors(source):
        return load_empty(cls, None, config=config, state_dict=state)


def _named(source: Source) -> Source:
    """Add the class with a place for most tensors to a config.json without `architectures`. Raises
    InputError where every class of its model type lacks some."""
    check_type(source)
    left = {name: count for name in _candidates(source) if (count := _left(source, name)) is not None}
    if not left:
        path = source.folder / "config.json"
        found = f"no architectures, and no class of {source.model_type!r} with these tensors"
        refuse(path, found, "the name of a model class of transformers", REMEDY)
    name = min(left, key=lambda each: left[each])
    said = f"config.json names no architectures: taken as {name}, whose tensors these are"
    return replace(source, config={**source.config, "architectures": [name]}, said=(*source.said, said))


def _candidates(source: Source) -> list[str]:
    """The classes of a model type, the most likely task first (masked ones if no decoder)."""
    config = made_config(source)
    tasks = ["ForCausalLM", "ForSeq2SeqLM", "ForMaskedLM", ""]
    if getattr(config, "is_decoder", None) is False:
        tasks = [*tasks[1:3], tasks[0], ""]
    classes = auto_classes(source.model_type)
    order = [f"AutoModel{task}" for task in tasks]
    order += sorted(classes.keys() - set(order))
    return list(dict.fromkeys(name for auto in order for name in classes.get(auto, ())))


def _left(source: Source, name: str) -> int | None:
    """How many tensors class `name` has no place for; None if it lacks some."""
    model, info = _loaded(source, getattr(transformers, name))
    if misfit(info, "missing", "mismatched"):
        return None
    keys = Keys(model)
    return sum(keys.key(stored) not in keys.known for stored in source.entries)


def _refuse_blocks(source: Source, model: PreTrainedModel, info: LoadingReport) -> None:
    """Refuse blocks beyond those that config.json counts, unless the class ignores them by name."""
    lists = {name: len(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    for key in sorted(info["unexpected_keys"]):
        for dot in re.finditer(r"\.(\d+)\.", key):
            count = lists.get(key[: dot.start()])
            if count is not None and int(dot[1]) >= count:
                found = f"tensor {quote(key)}"
                expected = f"{count} modules {key[: dot.start()]}.# by config.json"
                refuse(source.folder, found, expected, REMEDY)


def _placed(source: Source, keys: Keys) -> Source:
    entries = {name: entry for name, entry in source.entries.items() if keys.key(name) in keys.known}
    left = [entry for name, entry in source.entries.items() if name not in entries]
    if not left:
        return source
    name, more = source.config["architectures"][0], f" and {len(left) - 1} more" * (len(left) > 1)
    listed = f"{quote(left[0].name)[1:-1]}{more}"
    said = f"left out, as transformers does: {listed}, for which {name} has no place"
    return replace(source, entries=entries, left=tuple(left), said=(*source.said, said))


def _tied(source: Source, model: PreTrainedModel, keys: Keys) -> Source:
    """`source` with tied weights under the name that they are tied to. A weight with values of its own
    is stored apart, whatever config.json says."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    stored = {keys.key(name): name for name in source.entries}
    renamed = dict[str, str]()
    for key, giving in tied.items():
        if key in stored and giving not in stored and keys.key(giving) == giving:
            renamed[stored[key]] = giving
            stored[giving] = giving
            del stored[key]
    if renamed:
        moved = (replace(e, name=renamed.get(e.name, e.name)) for e in source.entries.values())
        source = replace(source, entries={entry.name: entry for entry in moved})
    pairs = [(stored[k], stored[giving]) for k, giving in tied.items() if {k, giving} <= stored.keys()]
    own = [(name, giving) for name, giving in pairs if not source.has(name, source, giving)]
    return _untied(source, keys, tied, own) if own else source


def _untied(source: Source, keys: Keys, tied: Mapping[str, str], own: list[tuple[str, str]]) -> Source:
    """Untie `source`, some of whose tied weights have values of their `own`. An encoder-decoder keeps
    its config.json: the key also scales outputs, and transformers finds the difference as it loads."""
    name, giving = own[0]
    said = (
        f"{name} is stored with values of its own, though config.json ties it to {giving}: taken as it "
        "is stored, as transformers does"
    )
    source = replace(source, said=(*source.said, said))
    config = {**_without_ties(source.config), TIES[0]: False}  # which it may be silent of
    if made_config(replace(source, config=config)).is_encoder_decoder:
        return source
    stored = {keys.key(name): entry for name, entry in source.entries.items()}
    copies = {k: stored[g] for k, g in tied.items() if k not in stored and g in stored}
    entries = {name: replace(entry, name=name) for name, entry in copies.items()}
    return replace(source, config=config, entries={**source.entries, **entries})


def _without_ties(config: dict[str, object]) -> dict[str, object]:
    parts = {k: _without_ties(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {**parts, **{key: False for key in TIES if key in parts}}


class Keys:
    """The names in `model` of stored tensors. `transforms`: of transformers' loader."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.known: dict[str, torch.Tensor] = model.state_dict()
        self.transforms: Any = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._renamings = [t for t in self.transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in self.transforms if isinstance(t, WeightConverter)]

    def key(self, name: str) -> str:
        """The name in the model of a stored tensor, or of the tensor that it becomes a part of."""
        found = rename_source_key(name, self._renamings, self._converters, self._prefix, self.known)[0]
        if found in self.known:
            return found
        return rename_source_key(name, [], [], self._prefix, self.known)[0]


def load_empty(
    cls: Any, folder: Path | None, **options: object
) -> tuple[PreTrainedModel, LoadingReport]:
    """A model of class `cls` on the meta device, and the loader's `output_loading_info`."""
    with quiet_transformers():
        model, info = cls.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    return model, info


def misfit(info: LoadingReport, *kinds: str) -> str:
    """Name the first of the `kinds` ("missing", …) of wrong keys in a loader's report; empty if none."""
    for kind in kinds:
        if names := sorted(str(key) for key in info.get(f"{kind}_keys") or ()):
            return f"{kind} keys {quote(names[:3], 240)[1:-1]} of {len(names)}"
    return ""


def renamed(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Stored names by the names in the model, where these differ."""
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    names = ((rename_source_key(name, renamings, [])[0], name) for name in stored)
    return {name: old for name, old in names if name != old}


def merged_names(model: PreTrainedModel, name: str, stored: Collection[str]) -> list[list[str]]:
    """The stored tensors behind the merged parameter `name`, a list for each expert in order. Empty if
    the parameter is made otherwise, or if some tensors are not among `stored`."""
    for converter in get_model_conversion_mapping(model):
        target = next((t for t in getattr(converter, "target_patterns", ()) if name.endswith(t)), None)
        steps = [type(step).__name__ for step in getattr(converter, "operations", ())]
        if target is None or steps not in MERGES:
            continue
        before = name.removesuffix(target)
        patterns = [before + pattern for pattern in converter.source_patterns]
        count = model.get_parameter(name).shape[0]
        found = [[p.replace("*", str(n)) for p in patterns] for n in range(count)]
        return found if all(each in stored for parts in found for each in parts) else []
    return []


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
    name = source.config["architectures"][0]
    cls = model_class(name) if name.startswith(PREFIX) else getattr(transformers, name)
    return _loaded(source, cls)[0].eval()


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
    """The stored tensors of a `model` by block, "" for those of no block. Raises as `made_config`."""

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
