"""Loads dense and structured checkpoints for evaluation and generation, in a dtype that they run in."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.base.device import COMPUTED, pick_device
from blr.compressor.base.errors import CapabilityError, InputError, UsageError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.config import REMEDY
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.checked import OURS, check_transformers, read_as_loaded
from blr.compressor.loading.native import (
    continues_text,
    has_encoder,
    quiet_transformers,
    sees_and_writes,
)
from blr.compressor.loading.sidecar_files import VOCABULARIES, check_defaults, check_generation
from blr.compressor.loading.smoke_run import check_model, plain_tokens
from blr.compressor.loading.tokenizer import REMEDY as TOKENIZER_REMEDY
from blr.compressor.loading.tokenizer import check_tokenizer
from blr.compressor.modeling import register
from blr.compressor.modeling.modeling_blr import PREFIX, misloaded
from blr.compressor.workspace.manifest import check_listed

GENERATES, EMBEDS = "AutoModelForCausalLM", "AutoModel"
NO_ADAPTER = {"subfolder": "no-adapter"}  # where peft looks for one: the model itself is asked for
ALWAYS_CAUSAL = "GPTNeoX"  # classes that are, whatever is_decoder says: transformers writes false


def load_model(
    folder: Path,
    task: str,
    *,
    dtype: str,
    device: str,
    trust: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load the model in `folder`, in evaluation mode, with every tensor in its place and finite.

    Args:
        task: the Auto class, as "AutoModelForCausalLM". dtype: one of `COMPUTED`.
        device: "auto" or a torch device.
        trust: run modeling code from the folder (never needed for outputs of blr).
        verify: hash what is read of an output of blr; sizes and headers are always compared.
        progress: is told what of a dense checkpoint is left out or read otherwise than it says.

    Raises UsageError, CapabilityError; InputError for no checkpoint of `task`, other bytes than the
    manifest lists, tensors missing or left over; NumericsError for weights or factors that overflow.
    """
    if dtype not in COMPUTED:
        raise UsageError(f"dtype {dtype!r}: expected one of {', '.join(COMPUTED)}")
    source = _as_loaded(_open(folder), trust)
    if progress is not None:
        progress.notes(source.notes())
    check_generation(folder)
    check_listed(folder, "all" if verify else "none")
    if task == GENERATES and not trust:
        _check_generates(source)
    if task == GENERATES and sees_and_writes(source):
        task = "AutoModelForImageTextToText"
    if task == EMBEDS and has_encoder(source):
        task = "AutoModelForTextEncoding"
    target = pick_device(device)
    model = _from_pretrained(source, task, dtype, trust)
    try:
        model = model.to(target).eval()
        check_model(model, folder)
    except torch.OutOfMemoryError as error:
        raise CapabilityError(f"{folder}: does not fit {target}; try --device cpu") from error
    return model


def _as_loaded(source: Source, trust: bool) -> Source:
    """A dense checkpoint of a class of transformers as every command reads it; any other unchanged."""
    own = trust and "auto_map" in source.config
    known = source.model_type in CONFIG_MAPPING and not source.model_type.startswith(OURS)
    if own or not known or source.config.get("quantization_config"):
        return source
    return read_as_loaded(source)


def _from_pretrained(source: Source, task: str, dtype: str, trust: bool) -> Any:
    folder = source.folder
    try:
        with quiet_transformers():  # whose report of what is missing is named below, too
            model, info = getattr(transformers, task).from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                trust_remote_code=trust,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # and named below
                adapter_kwargs=NO_ADAPTER,
            )
        found = misloaded(model, {**info, "unexpected_keys": ()} if source.left else info)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # hostile values of a config make transformers raise anything
        raise_exhausted(error)
        raise InputError(
            f"{folder}: does not load as {task}: {first_line(error)}; check the checkpoint"
            + ("" if trust else " (its own code runs only with --trust-remote-code)")
        ) from error
    if getattr(model.config, "is_encoder_decoder", False):
        found = "an encoder-decoder model (is_encoder_decoder)"
        raise InputError(f"{folder}: found {found}; give a decoder or an encoder")
    if found:
        refuse(folder, found, "the tensors that config.json describes", "copy the checkpoint again")
    model.config.return_dict = True  # results by name, as those who call it here take them
    return model


def _check_generates(source: Source) -> None:
    """Raise InputError for a class that continues no text, such as an encoder."""
    names = source.config.get("architectures") or []
    name = names[0].removeprefix(PREFIX) if names else None
    if name is not None and hasattr(transformers, name) and not continues_text(source):
        expected = "a causal language model (LlamaForCausalLM, …)"
        refuse(source.folder, f"{name}, which continues no text", expected, "take a decoder")
    encodes = source.config.get("is_decoder") is False
    if name is not None and encodes and not name.startswith(ALWAYS_CAUSAL):
        refuse(source.folder, f"{name} of is_decoder false", "a decoder", "give the folder of one")


def load_tokenizer(folder: Path, *, trust: bool = False, text: str = "") -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`, after a trial on the start of `text`. Raises InputError."""
    _open(folder)
    check_tokenizer(folder, text)
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust, local_files_only=True
            )
    except Exception as error:  # as above, of the tokenizer's files
        raise_exhausted(error)
        if not any((folder / name).exists() for name in VOCABULARIES):
            refuse(folder, "no tokenizer", "tokenizer.json, or a vocabulary", TOKENIZER_REMEDY)
        raise InputError(
            f"{folder}: no tokenizer that loads ({first_line(error)}); {TOKENIZER_REMEDY}"
        ) from error


def _open(folder: Path) -> Source:
    """Open `folder` with blr's model types registered. Raises InputError as `open_source`, and for an
    unknown type: transformers alone would wait on a FIFO or unpickle."""
    register()
    source = open_source(folder)
    check_transformers(source, "text is read and written by")
    check_defaults(folder)  # whose errors would otherwise be said to be the tokenizer's
    ours = "blr" in source.config and source.model_type.startswith("blr_")
    if ours and source.model_type not in CONFIG_MAPPING:
        found = f"model type {quote(source.model_type)}"
        expected = "blr_ and one that this version of transformers has"
        refuse(folder / "config.json", found, expected, REMEDY)
    return source


TOKENS = 4  # read to see whether a model runs


def model_dtype(device: torch.device) -> str:
    """bfloat16 on a GPU, float32 elsewhere."""
    return "bfloat16" if device.type == "cuda" else "float32"


def load_computing(
    folder: Path, task: str, device: torch.device, dtype: str | None = None
) -> PreTrainedModel:
    """Load a model of text in `dtype` (by default `model_dtype`), or in float32 where it does not run in
    that: some, as XLNet, multiply tensors of two dtypes."""
    asked = dtype or model_dtype(device)
    model = load_model(folder, task, dtype=asked, device=str(device))
    if asked == "float32" or _runs(model):
        return model
    del model
    return load_model(folder, task, dtype="float32", device=str(device))


@torch.no_grad()
def _runs(model: PreTrainedModel) -> bool:
    ids = plain_tokens(model.config)[None, :TOKENS].to(model.device)
    try:
        model(input_ids=ids)
    except Exception as error:  # whatever a model raises where dtypes meet
        raise_exhausted(error)
        return False
    return True
