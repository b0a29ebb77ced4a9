"""The way back: an ordinary dense checkpoint, every structured layer multiplied out.

For converters (GGUF) and engines that know nothing of blr: the native model type and class, no Python
files. A layer is made when its turn to be written comes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.pytorch_utils import Conv1D

from blr.compressor import __version__
from blr.compressor.checkpoint.extras import CARD, inert
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import plan_tensors
from blr.compressor.loading.discover import meta_model
from blr.compressor.loading.native import native_class
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.modeling.registry import declared_keys, register
from blr.compressor.output.card import TAGS, card_front
from blr.compressor.output.files import carried_files, check_fills, check_loads, json_file
from blr.compressor.output.loss_messages import MARK

TEMPLATE = """# {name}, made dense by blr

{count} structured layers multiplied out to dense weights: an ordinary {type} checkpoint of the size of
the model it came from, with the losses of its compression. Any tool that takes {type} takes it. Written
by blr {version}; `blr verify` checks the files against `blr_manifest.json`.
{loss}"""


def plan_dense(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Every structured layer made dense. Raises InputError for tensors that would not load."""
    source, specs, dtype = checkpoint.source, checkpoint.specs, options.dtype
    register(source.model_type)  # tokenizers of the source are loaded by its model type
    config = dense_config(source, dtype)
    tensors = plan_tensors(source, {}, dtype, None, specs, transposed_modules(checkpoint))
    cls = native_class(source)
    check_fills(source, cls, config, tensors.shapes)
    how = (partial(_small_files, source, config, len(specs), options.source_name),)
    kept = replace(checkpoint, specs={})
    return ExportPlan(
        kept, specs, config, tensors, sorted(specs), *how, partial(check_loads, source, cls), {}
    )


def _small_files(
    source: Source, config: dict[str, Any], count: int, name: str
) -> dict[str, bytes | Path]:
    told = {"name": name, "count": count, "type": source.model_type, "version": __version__}
    card = card_front(source.folder, name, TAGS[:1]) + TEMPLATE.format(**told, loss=MARK)
    return {**carried_files(source), "config.json": json_file(config), CARD: card.encode()}


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
