"""Compares tensor shapes with what config.json implies by a family's table (`shapes` in configs/), such
as ``h.*.attn.c_attn.weight: [n_embd, 3*n_embd]``. A dimension is an integer, a sum of products of
integers and config keys, or `_` for any. A name that ends in `#` counts the modules numbered there."""

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.context import of_text
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source

ANY = "_"
MAX_VALUE = 2**31  # no model dimension comes near
REMEDY = "take config.json and weights from the same model"
_TERM = re.compile(r"\d{1,9}|[A-Za-z_]\w*", re.ASCII)
# Keys that configs leave out or set to null, by what transformers then takes
_DEFAULTS = {"num_key_value_heads": "num_attention_heads", "n_inner": "4*n_embd"}


def check_against_config(
    source: Source, shapes: Mapping[str, Sequence[str | int]] | None = None
) -> None:
    """Raise InputError for tensors or counts of layers that config.json does not imply; a dimension
    without its config key is not checked. Raises ValueError for malformed `shapes`."""
    for pattern, symbols in (shapes or {}).items():
        expected = [evaluate(source, symbol) for symbol in symbols]
        if pattern.endswith("#"):
            _check_count(source, pattern[:-1], expected[0], str(symbols[0]))
            continue
        matches = re.compile(fnmatch.translate(pattern)).match
        for name, entry in source.entries.items():
            pairs = zip(entry.shape, expected, strict=False)
            agrees = len(entry.shape) == len(expected) and all(want in (None, n) for n, want in pairs)
            if matches(name) and not agrees:
                wanted = _listed(ANY if want is None else want for want in expected)
                reason = quote(_listed(symbols), 160)[1:-1]
                found = f"tensor {quote(entry.name)} of shape {_listed(entry.shape)}"
                refuse(entry.file, found, f"{wanted} = {reason} by config.json", REMEDY)


def evaluate(source: Source, symbol: str | int) -> int | None:
    """Value of a symbolic dimension; None if unknown or any. Raises InputError for a config value that
    is no positive integer, ValueError for a malformed `symbol`."""
    if symbol == ANY:
        return None
    total = 0
    for product in str(symbol).replace(" ", "").split("+"):
        factors = [_factor(source, term) for term in product.split("*")]
        if None in factors:
            return None
        total += math.prod(factor for factor in factors if factor is not None)
    return total


def _factor(source: Source, term: str) -> int | None:
    if not _TERM.fullmatch(term):
        raise ValueError(f"{term!r} is neither an integer nor a config key")
    if term.isdigit():
        return int(term)
    value = of_text(source.config).get(term)
    if value is None:
        if term == "head_dim":
            width, heads = (_factor(source, key) for key in ("hidden_size", "num_attention_heads"))
            return width // heads if width and heads else None
        return evaluate(source, _DEFAULTS[term]) if term in _DEFAULTS else None
    if type(value) is not int or not 1 <= value <= MAX_VALUE:
        path = source.folder / "config.json"
        refuse(path, f"{term} {quote(value)}", "a positive integer", REMEDY)
    return value


def _check_count(source: Source, prefix: str, expected: int | None, symbol: str) -> None:
    """Compares the numbers right after `prefix` in tensor names with 0 … `expected` - 1."""
    numbered = re.compile(fnmatch.translate(prefix).removesuffix(r"\Z").removesuffix(r"\z"))
    numbers = set()
    for name in source.entries:
        if start := numbered.match(name):
            digits = re.match(r"(\d{1,9})\.", name[start.end() :], re.ASCII)
            numbers |= {int(digits[1])} if digits else set()
    if expected is not None and numbers and numbers != set(range(expected)):
        found = f"{len(numbers)} modules {quote(prefix + '#')}, numbered to {max(numbers)}"
        refuse(source.folder, found, f"{symbol} = {expected} by config.json", REMEDY)


def _listed(values: Iterable[object]) -> str:
    return "[" + ", ".join(str(value) for value in values) + "]"
