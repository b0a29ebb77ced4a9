"""Finds the linear layers of a family that has no table in `configs/`, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import InputError
from blr.compressor.families import Family
from blr.compressor.modeling.modeling_blr import module_name


def discover_family(source: Source) -> Family:
    """A table made from the model itself: every linear layer but the output embedding.

    Raises InputError when transformers does not know the model type or architecture.
    """
    model = meta_model(source)
    head = model.get_output_embeddings()
    kinds = nn.Linear, Conv1D
    linear = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and m is not head}
    stored = {name.rpartition(".")[0] for name in source.entries if name.endswith(".weight")}
    modules = {n: n.rpartition(".")[2] for n in sorted(stored) if module_name(model, n) in linear}
    transposed = any(isinstance(module, Conv1D) for module in linear.values())
    model_type = source.config["model_type"]
    return Family(model_type, (model_type,), modules, (), {}, transposed)


def meta_model(source: Source) -> Any:
    """The native model of a checkpoint, without weights."""
    config = dict(source.config)
    model_type, names = config.pop("model_type"), config.get("architectures") or []
    native = getattr(transformers, names[0], None) if names else None
    if model_type not in CONFIG_MAPPING or native is None:
        raise InputError(
            f"{source.folder}: model type {model_type!r} with architectures {names} is not one that "
            "transformers has; blr cannot find its linear layers"
        )
    with torch.device("meta"):
        return native(CONFIG_MAPPING[model_type].from_dict(config))
