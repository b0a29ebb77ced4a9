"""Checks that an export loads: before anything is written from shapes, at the end from its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationMixin

from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.loading.native import native_class, native_errors, read_context
from blr.compressor.loading.quiet_libraries import quiet_transformers
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import register
from blr.compressor.output.files import check_fills


def export_context(checkpoint: Checkpoint, asked: int | None, default: int) -> int | None:
    """Tokens of context to prepare generation for; None for a model that does not generate.

    Raises UsageError: a context for an encoder; CapabilityError: more than the model has positions;
    InputError: a model type or architecture that transformers does not have.
    """
    source = checkpoint.source
    native = native_class(source)
    if not issubclass(native, GenerationMixin):
        if asked is not None:
            kind = native.__name__
            raise UsageError(f"--context {asked}: {kind} generates no text, leave the option out")
        return None
    limit = read_context(source)
    if asked is not None and asked > limit:
        raise CapabilityError(f"--context {asked}: the model has {limit} positions; choose at most that")
    return asked or min(limit, default)


def check_fits(source: Source, config: Mapping[str, Any], shapes: Mapping[str, Any]) -> Any:
    """The class of the model of `config`, which tensors of `shapes` fill. Raises InputError when they do
    not, or when transformers cannot build it."""
    with native_errors(source):
        register(source.model_type)
        cls = model_class(config["architectures"][0])
    check_fills(source, cls, config, shapes)
    return cls


def load_export(folder: Path, config: Mapping[str, Any], device: str = "auto") -> Any:
    """The model in `folder`, as stored, in evaluation mode; "auto": on the GPU if there is one."""
    with quiet_transformers():
        model = model_class(config["architectures"][0]).from_pretrained(folder, dtype="auto")
    return model.to(pick_device(device)).eval()
