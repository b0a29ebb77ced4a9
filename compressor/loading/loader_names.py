"""What transformers takes of a dense checkpoint: the class, its tensors, and which of them are one.

Its loader is asked, on the meta device. All that comes after sees a checkpoint as its class saves it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.native import (
    check_type,
    made_config,
    native_class,
    native_errors,
    quiet_transformers,
)
from blr.compressor.modeling.registry import auto_classes

LoadingReport = Mapping[str, Iterable[str]]  # of transformers: wrong keys by kind, as "missing_keys"

REMEDY = "take config.json and weights from the same model"
TIES = ("tie_word_embeddings", "tie_embedding")  # what configurations call it
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # steps of transformers' loader


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
    config = made_config(source)
    with native_errors(source):
        return load_empty(cls, None, config=config, state_dict=meta_tensors(source.entries.values()))


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
    own = [(name, giving) for name, giving in pairs if not _are_equal(source, name, giving)]
    return _untied(source, keys, tied, own) if own else source


def _are_equal(source: Source, name: str, other: str) -> bool:
    one, two = source.entries[name], source.entries[other]
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    return all(map(eq, source.read_bytes(one), source.read_bytes(two)))


def _untied(source: Source, keys: Keys, tied: Mapping[str, str], own: list[tuple[str, str]]) -> Source:
    """Untie `source`, some of whose tied weights have values of their `own`. An encoder-decoder keeps
    its config.json: there the key also scales outputs, and transformers finds the difference when it
    loads."""
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
    """The names in `model` of stored tensors. `known` is its state; `transforms` are the renamings and
    merges of transformers' loader."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.known: dict[str, Any] = model.state_dict()
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


def meta_tensors(entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Tensors of the stored shapes and dtypes without data (float32 for a dtype that torch lacks)."""
    return {
        entry.name: torch.empty(
            entry.shape, dtype=getattr(torch, TORCH_NAMES.get(entry.dtype, "float32")), device="meta"
        )
        for entry in entries
    }


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
