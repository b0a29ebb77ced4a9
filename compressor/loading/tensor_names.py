"""Where a model of transformers keeps the tensors of a checkpoint, by the rules of its loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import TORCH_NAMES
from blr.compressor.loading.quiet_libraries import quiet_transformers


class Keys:
    """The names that `model` gives to stored tensors. `known` are those of its state; `transforms` are
    what transformers does to tensors on the way."""

    def __init__(self, model: Any) -> None:
        self.known: dict[str, Any] = model.state_dict()
        self.transforms: Any = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._renamings = [t for t in self.transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in self.transforms if isinstance(t, WeightConverter)]

    def key(self, name: str) -> str:
        """The name in the model of the stored tensor `name`, or of the one that it becomes a part of."""
        found = rename_source_key(name, self._renamings, self._converters, self._prefix, self.known)[0]
        if found in self.known:
            return found
        return rename_source_key(name, [], [], self._prefix, self.known)[0]


def meta_tensors(entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Tensors of the stored shapes and dtypes without data, by name; of any dtype where torch has no
    bytes for the stored one, which fails when it is read."""
    return {
        entry.name: torch.empty(
            entry.shape, dtype=getattr(torch, TORCH_NAMES.get(entry.dtype, "float32")), device="meta"
        )
        for entry in entries
    }


def load_empty(cls: Any, folder: Path | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model of class `cls` as transformers loads it, on the meta device, and what its loader says of
    keys (`output_loading_info`)."""
    with quiet_transformers():
        model, info = cls.from_pretrained(
            folder,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    return model, info


def misfit(info: dict[str, Any], *kinds: str) -> str:
    """The first of the `kinds` ("missing", …) of keys that a loader said something of; empty if none."""
    for kind in kinds:
        if names := sorted(str(key) for key in info.get(f"{kind}_keys") or ()):
            return f"{kind} keys {quote(names[:3], 240)[1:-1]} of {len(names)}"
    return ""
