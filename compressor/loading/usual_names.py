"""Tells from names alone whether a checkpoint holds what its class saves: transformers need not be
asked about that one, which takes seconds to import.

`configs/usual.yaml` lists the names by class, with `#` in the place of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from blr.compressor.checkpoint.source import Source

TIES = "tie_word_embeddings"
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d{0,8})(?=\.)")


def is_usual(source: Source) -> bool:
    """Whether `source` has the tensors that its class saves by default, all of them and no other."""
    named = source.config.get("architectures") or []
    layout = layouts().get(named[0]) if len(named) == 1 else None
    if layout is None or source.model_type not in layout["model_types"]:
        return False
    expected = {*_names(layout["names"]), *_names(layout["inside"], f"{layout['block']}.")}
    if "head" in layout and source.config.get(TIES, layout["ties"]) is False:
        expected.add(layout["head"])
    found = _numbered(source.entries)
    counts = {max(first for first, *_ in numbers) for numbers in found.values() if () not in numbers}
    return found.keys() == expected and len(counts) == 1 and all(map(_is_whole, found.values()))


def _names(words: str, prefix: str = "") -> Iterator[str]:
    """The tensors that `words` of a layout name."""
    for word in words.split():
        module, mark, bias = word.partition("+")
        if word.endswith("="):
            yield f"{prefix}{word[:-1]}"
            continue
        yield f"{prefix}{module}.weight"
        if mark:
            yield f"{prefix}{module}.{bias}"


def _numbered(names: Collection[str]) -> dict[str, set[tuple[int, ...]]]:
    """The numbers in `names`, by the name without them."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        found.setdefault(_NUMBER.sub("#", name), set()).add(numbers)
    return found


def _is_whole(numbers: set[tuple[int, ...]]) -> bool:
    """Whether every number from 0 on is there, of several beside each of the others."""
    counts = [max(column) + 1 for column in zip(*numbers, strict=True)]
    return len(numbers) == math.prod(counts)  # of distinct ones, so none is left out


@cache
def layouts() -> dict[str, dict[str, Any]]:
    """What `configs/usual.yaml` says, by class."""
    from ruamel.yaml import YAML

    table = YAML(typ="safe").load(files("blr.configs").joinpath("usual.yaml").read_text("utf-8"))
    return {name: layout for layout in table for name in layout["classes"]}
