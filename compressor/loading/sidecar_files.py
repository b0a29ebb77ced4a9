"""What an output takes along besides its weights: tried before the work, settled after it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import OutputError
from blr.compressor.base.exhaustion import is_panic, raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.base.scratch import scratch_folder
from blr.compressor.checkpoint.hints import REMEDY, carried
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.remedies import storage_errors
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.model_defaults import GENERATION, check_defaults
from blr.compressor.loading.quiet_libraries import quiet_transformers
from blr.compressor.loading.tokenizer import PROBE, check_tokenizer
from blr.compressor.modeling.modeling_blr import PREFIX

TOKENIZER = "tokenizer_config.json"
# Any of which makes a tokenizer, but for those of bytes
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def check_carried(source: Source, config: Mapping[str, Any]) -> None:
    """Find now what would fail when an output with `config` is checked after hours of work.

    Raises:
        InputError: a tokenizer that explodes or is none, a generation_config.json that loaders refuse.
        OutputError: a tokenizer that cannot be carried over to the model type of `config`.
    """
    check_tokenizer(source.folder)
    check_generation(source.folder)
    _check_modules(source)
    with scratch_folder() as folder, storage_errors(folder):
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        for name, path in source.extra_files().items():
            data = carried(path)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, Path):
                (folder / name).symlink_to(os.path.abspath(data))
            else:
                (folder / name).write_bytes(data)
        keep_tokenizer(source.folder, folder)


def _check_modules(source: Source) -> None:
    """Raise InputError for a sentence-transformers module that would lack its weights."""
    for name in source.extras.pickled:
        remedy = "convert them, or pass --allow-pickle if you trust them"
        refuse(source.folder / name, "only pickled weights of a module", "safetensors", remedy)


def check_generation(folder: Path) -> None:
    """Refuse defaults for generation that no model can be loaded with. Raises InputError."""
    check_defaults(folder)
    path = folder / GENERATION
    if not os.path.exists(path):
        return
    try:
        with quiet_transformers():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever hostile values make it raise
        raise_exhausted(error)
        reason = quote(first_line(error), 160)[1:-1]
        refuse(path, f"settings that transformers refuses ({reason})", "those of a model", REMEDY)


def keep_tokenizer(source: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """Name the source's tokenizer class in tokenizer_config.json if it would not be found without it:
    whoever does not run our code has a configuration of no type.

    Returns:
        What was rewritten (size, SHA-256).

    Raises OutputError when the tokenizer still gives other ids, with our code or without.
    """
    before = token_ids(source)
    if before is None or _same_ids(before, folder):
        return {}
    path = folder / TOKENIZER
    table = json.loads(path.read_bytes()) if path.exists() else {}
    text = json.dumps({**table, "tokenizer_class": before[0]}, indent=2)
    written = write_stream(path, [text.encode() + b"\n"])
    if not _same_ids(before, folder):
        raise OutputError(
            f"{folder}: its tokenizer does not give the ids of the source's; "
            f"this transformers version cannot carry a {before[0]} over to another model type; save the "
            "source's tokenizer as tokenizer.json, or take another version"
        )
    return {path.name: written}


def _same_ids(expected: tuple[str, list[int]], folder: Path) -> bool:
    kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    ways = (True, False) if kind.startswith(f"{PREFIX.lower()}_") else (True,)
    found = [token_ids(folder, code=code) for code in ways]
    return all(each is not None and each[1] == expected[1] for each in found)


def token_ids(folder: Path, *, code: bool = True) -> tuple[str, list[int]] | None:
    """Class name of the tokenizer in `folder` and its ids of a probing text.

    code: with our model type known. None when it has no tokenizer, or one that does not load without
    code of its own.
    """
    if not any((folder / name).exists() for name in VOCABULARIES):
        return None
    try:
        with quiet_transformers():
            known = {} if code else {"config": PreTrainedConfig.from_pretrained(folder)}
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, **known
            )
            return type(tokenizer).__name__, tokenizer(PROBE)["input_ids"]
    except BaseException as error:
        raise_exhausted(error)
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return None
