"""The way back: an ordinary dense checkpoint, every structured layer multiplied out.

For converters (GGUF) and engines that know nothing of blr: the native model type and class, no Python
files. A layer is made when its turn to be written comes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from blr.compressor import __version__
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.checkpoint.extras import CARD
from blr.compressor.checkpoint.hints import inert
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.job import ExportRun
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import plan_tensors
from blr.compressor.loading.discover import meta_model
from blr.compressor.loading.native import decoded, native_class, native_errors
from blr.compressor.loading.sidecar_files import keep_tokenizer
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.modeling.registry import declared_keys, register
from blr.compressor.output.files import carried_files, misfits
from blr.compressor.output.front import TAGS, card_front
from blr.compressor.output.loss_messages import MARK

TEMPLATE = """# {name}, made dense by blr

{count} structured layers multiplied out to dense weights: an ordinary {type} checkpoint of the size of
the model it came from, with the losses of its compression. Any tool that takes {type} takes it. Written
by blr {version}; `blr verify` checks the files against `blr_manifest.json`.
{loss}"""


class DenseExport(ExportRun):
    """An export in which no layer is structured."""

    def _small_files(self) -> dict[str, bytes | Path]:
        source = self.plan.checkpoint.source
        facts = {"count": len(self.plan.densified), "type": source.model_type, "version": __version__}
        facts["loss"] = MARK
        name = self.options.source_name
        front = card_front(source.folder, name, TAGS[:1])
        return {
            **carried_files(source),
            "config.json": json.dumps(self.plan.config, indent=2).encode() + b"\n",
            CARD: (front + TEMPLATE.format(name=name, **facts)).encode(),
        }

    def _check(self, partial: Path) -> dict[str, tuple[int, str]]:
        source = self.plan.checkpoint.source
        if found := misfits(native_class(source), partial):
            raise OutputError(
                f"{partial}: {found} when reloaded; this is a bug in blr, keep the checkpoint"
            )
        return keep_tokenizer(source.folder, partial)

    def _described(self) -> dict[str, Any]:
        return {}


def plan_dense(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Every structured layer made dense. Raises InputError for tensors that would not load."""
    source, specs, dtype = checkpoint.source, checkpoint.specs, options.dtype
    register(source.model_type)  # tokenizers of the source are loaded by its model type
    config = dense_config(source, dtype)
    tensors = plan_tensors(source, {}, dtype, None, specs, transposed_modules(checkpoint))
    check_fits(source, config, tensors.shapes)
    return ExportPlan(replace(checkpoint, specs={}), specs, config, tensors, sorted(specs))


def dense_config(source: Source, dtype: str | None) -> dict[str, Any]:
    """config.json of the native model, with `dtype` (torch's name) if one is given."""
    config = inert(dict(source.config), declared_keys(source.model_type))
    if dtype is None:
        return config
    return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": dtype}


def transposed_modules(checkpoint: Checkpoint) -> set[str]:
    """Structured modules in the place of layers that store their weight [i, o], as GPT-2's do."""
    model = meta_model(checkpoint.source)
    modules = dict(model.named_modules())
    named = module_names(model, checkpoint.specs)
    return {stored for stored, name in named.items() if isinstance(modules.get(name), Conv1D)}


def check_fits(source: Source, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Raise InputError when tensors of `shapes` do not fill the native model of `config`."""
    native = native_class(source)
    with native_errors(source):
        made = CONFIG_MAPPING[source.model_type].from_dict(decoded(config))
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        found = misfits(native, None, config=made, state_dict=tensors)
    if found:
        remedy = "take config.json and weights from the same model"
        raise InputError(f"{source.folder}: {found} for {native.__name__}; {remedy}")
