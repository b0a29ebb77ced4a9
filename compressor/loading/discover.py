"""Finds the linear layers of a family that has no table in `configs/`, on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from blr.compressor.architectures import Family
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.native import REMEDY, native_class, native_errors
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


def meta_model(source: Source, *, buffers: bool = False) -> Any:
    """The native model of a checkpoint without weights; with `buffers`, position tables and other
    buffers that no checkpoint stores are real.

    Raises InputError when transformers does not know the model type or architecture.
    """
    native = native_class(source)
    if native is None:
        path = source.folder / "config.json"
        refuse(path, "no architectures", "the name of a model class of transformers", REMEDY)
    config = {key: value for key, value in source.config.items() if key != "model_type"}
    empty = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
    with native_errors(source), empty:
        return native(CONFIG_MAPPING[source.model_type].from_dict(config))
