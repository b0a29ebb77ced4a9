"""Checks that an export loads: before anything is written from shapes, at the end from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, InputError, OutputError, UsageError
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.loading.native import decoded, native_class, native_errors
from blr.compressor.loading.quiet_libraries import quiet_transformers
from blr.compressor.loading.sidecar_files import keep_tokenizer
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import register
from blr.compressor.output.files import misfits


def export_context(checkpoint: Checkpoint, asked: int | None, default: int) -> int | None:
    """Tokens of context to prepare generation for; None for a model that does not generate.

    Raises:
        UsageError: a context for an encoder.
        CapabilityError: more than the model has positions.
        InputError: a model type or architecture that transformers does not have.
    """
    source = checkpoint.source
    native = native_class(source)
    if not issubclass(native, GenerationMixin):
        if asked is not None:
            kind = native.__name__
            raise UsageError(f"--context {asked}: {kind} generates no text, leave the option out")
        return None
    with native_errors(source):
        config = CONFIG_MAPPING[source.model_type].from_dict(decoded(source.config))
        limit = context_of(config.to_dict())
    if asked is not None and asked > limit:
        raise CapabilityError(f"--context {asked}: the model has {limit} positions; choose at most that")
    return asked or min(limit, default)


def check_fits(source: Source, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Check before any work that tensors of `shapes` fill the model of `config`.

    Raises InputError when they do not, or when transformers cannot build it.
    """
    with native_errors(source):
        register(source.model_type)
        cls = model_class(config["architectures"][0])
        ours = cls.config_class.from_dict(decoded(config))
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        found = misfits(cls, None, config=ours, state_dict=tensors)
    if found:
        remedy = "take config.json and weights from the same model"
        raise InputError(f"{source.folder}: {found} for {config['architectures'][0]}; {remedy}")


def check_reload(source: Source, folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Check that transformers loads `folder` whole, tokenizer included.

    Returns:
        Files rewritten to make it so (size, SHA-256): tokenizer_config.json, when the model type
        of our own would otherwise select another tokenizer class.

    Raises:
        OutputError: it would not load as it should.
    """
    if found := misfits(model_class(config["architectures"][0]), folder):
        raise OutputError(f"{folder}: {found} when reloaded; this is a bug in blr, keep the checkpoint")
    return keep_tokenizer(source.folder, folder)


def load_export(folder: Path, config: Mapping[str, Any], device: str = "auto") -> Any:
    """The model in `folder`, as stored, in evaluation mode; "auto": on the GPU if there is one."""
    with quiet_transformers():
        model = model_class(config["architectures"][0]).from_pretrained(folder, dtype="auto")
    return model.to(pick_device(device)).eval()
