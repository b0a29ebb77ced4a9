"""Loads dense and structured checkpoints for evaluation and generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import blr.compressor.modeling  # noqa: F401  (registers the structured model types)
from blr.compressor.checkpoint.source import open_source
from blr.compressor.errors import CapabilityError, InputError, UsageError
from blr.compressor.factorize import pick_device
from blr.compressor.modeling.quiet import quiet_transformers
from blr.compressor.modeling.registry import register

DTYPES = ("float32", "float16", "bfloat16", "float64")


def load_model(folder: Path, task: str, *, dtype: str, device: str, trust: bool = False) -> Any:
    """The model in `folder`, in evaluation mode.

    Args:
        task: the Auto class, as "AutoModelForCausalLM".
        dtype: one of `DTYPES`. device: "auto" or a torch device.
        trust: run modeling code from the folder (never needed for outputs of blr).

    Raises:
        UsageError, InputError, CapabilityError.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    _register_structured(folder)
    target = pick_device(device)
    transformers.utils.logging.disable_progress_bar()
    try:
        model = getattr(transformers, task).from_pretrained(
            folder, dtype=getattr(torch, dtype), trust_remote_code=trust, local_files_only=True
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # hostile values of a config make transformers raise anything
        raise InputError(
            f"{folder}: does not load as {task}: {_first_line(error)}; check the checkpoint"
            + ("" if trust else " (its own code runs only with --trust-remote-code)")
        ) from error
    try:
        return model.to(target).eval()
    except torch.OutOfMemoryError as error:
        raise CapabilityError(f"{folder}: does not fit {target}; try --device cpu") from error


def load_tokenizer(folder: Path, *, trust: bool = False) -> Any:
    """The tokenizer in `folder`. Raises InputError when it has none that loads."""
    _register_structured(folder)
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust, local_files_only=True
            )
    except Exception as error:  # as above, of the tokenizer's files
        raise InputError(
            f"{folder}: no tokenizer that loads ({_first_line(error)}); add the tokenizer files"
        ) from error


def _register_structured(folder: Path) -> None:
    """Check the files of `folder`, and register its model type if that is one of ours without a
    table in configs/.

    Raises InputError as `open_source`: transformers would wait on a FIFO or unpickle.
    """
    source = open_source(folder)
    if "blr" in source.config and source.model_type.startswith("blr_"):
        register(source.model_type.removeprefix("blr_"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
