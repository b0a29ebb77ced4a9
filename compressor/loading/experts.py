"""Tensors that are called, or parted, otherwise in checkpoints than in models, as experts are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # steps of transformers' loader


def renamed(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Tensors on disk by what transformers calls them, where that is another name."""
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    names = ((rename_source_key(name, renamings, [])[0], name) for name in stored)
    return {name: old for name, old in names if name != old}


def merged_names(model: Any, name: str, stored: Collection[str]) -> list[list[str]]:
    """For a parameter `name` of `model` that holds what its checkpoint keeps apart, as the experts of a
    layer: for every expert the tensors, named as in `module_names`, that are one upon another in its
    part. Empty if it is made otherwise, or if some of it is not among `stored`."""
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
