"""Opens a dense checkpoint as transformers reads it, and checks its tensors against config.json."""

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import TRANSFORMERS
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.shapes import check_against_config
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.recipe.architectures import find_family, read_config_table

OURS = ("blr_", "Blr")  # model types in transformers, classes in diffusers
TIES = "tie_word_embeddings"
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,8})(?=\.)")


def open_checked(folder: Path, allow_pickle: bool = False, scratch: Path | None = None) -> Source:
    """Open a dense checkpoint as transformers reads it. Raises InputError, also for an output of blr."""
    source = open_source(folder, allow_pickle=allow_pickle, scratch=scratch)
    check_dense(folder, source.model_type)
    check_unquantized(source)
    return read_as_loaded(source)


def read_as_loaded(source: Source) -> Source:
    """Ask transformers which tensors are the model's, where their names are not the usual ones. Raises
    InputError for tensors that config.json does not describe."""
    if source.library is TRANSFORMERS and not is_usual(source):
        from blr.compressor.loading.loader import taken  # imports torch

        source = taken(source)
    family = find_family(source.model_type)
    check_against_config(source, family.shapes if family else None)
    return source


def check_dense(folder: Path, model_type: str) -> None:
    if model_type.startswith(OURS):
        raise InputError(
            f"{folder}: model type {model_type!r} is already compressed by blr; "
            "compress the dense checkpoint it came from (blr inspect shows what was done)"
        )


def check_transformers(source: Source, what: str) -> None:
    """Raise InputError for a model of another library; `what` begins the sentence on what is taken."""
    if source.library is not TRANSFORMERS:
        raise InputError(
            f"{source.folder}: found {source.model_type}, a model of {source.library.name}; "
            f"{what} models of transformers; use blr compress, plan, inspect or verify with this one"
        )


def check_unquantized(source: Source) -> None:
    """Raise InputError for quantized weights, whose loader would quantize structured layers, too."""
    settings = source.config.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        found = f"quantization_config of method {quote(method, 40)}"
        remedy = "dequantize the checkpoint, or take the one it was made from"
        refuse(source.folder / "config.json", found, "a dense checkpoint", remedy)


def is_usual(source: Source) -> bool:
    """Whether `source` has exactly the tensors that its class saves by default."""
    named = source.config.get("architectures") or []
    layout = layouts().get(named[0]) if len(named) == 1 else None
    if layout is None or source.model_type not in layout["model_types"]:
        return False
    expected = {*_names(layout["names"]), *_names(layout["inside"], f"{layout['block']}.")}
    if "head" in layout and source.config.get(TIES, layout["ties"]) is False:
        expected.add(layout["head"])
    found: dict[str, set[tuple[int, ...]]] = {}
    for name in source.entries:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        found.setdefault(_NUMBER.sub("#", name), set()).add(numbers)
    counts = {max(first for first, *_ in numbers) for numbers in found.values() if () not in numbers}
    return found.keys() == expected and len(counts) == 1 and all(map(_is_whole, found.values()))


def _names(words: str, prefix: str = "") -> Iterator[str]:
    for word in words.split():
        module, mark, bias = word.partition("+")
        if word.endswith("="):
            yield f"{prefix}{word[:-1]}"
            continue
        yield f"{prefix}{module}.weight"
        if mark:
            yield f"{prefix}{module}.{bias}"


def _is_whole(numbers: set[tuple[int, ...]]) -> bool:
    """Whether every number from 0 on occurs, in each combination."""
    counts = [max(column) + 1 for column in zip(*numbers, strict=True)]
    return len(numbers) == math.prod(counts)  # of distinct ones, so none is left out


@cache
def layouts() -> dict[str, dict[str, Any]]:
    table = read_config_table("usual.yaml")
    return {name: layout for layout in table for name in layout["classes"]}
