"""Types of a recipe's fields: numbers, globs, chains, heads; and the messages for wrong values."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import ErrorDetails

from blr.compressor.base.errors import UsageError
from blr.compressor.base.globs import MAX_GLOB, MAX_GLOBS
from blr.compressor.base.quoting import quote
from blr.compressor.structures.patterns import check_pattern

Bits = Annotated[float, Field(gt=0.0, le=32.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
CacheFactor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]  # 1: all ranks, for --kv-quantize
Positive = Annotated[int, Field(ge=1, le=2**31)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Glob = Annotated[str, Field(min_length=1, max_length=MAX_GLOB)]
Globs = Annotated[list[Glob], Field(max_length=MAX_GLOBS)]


def _checked_pattern(text: str) -> str:
    try:
        check_pattern(text)
    except UsageError as error:
        raise ValueError(str(error).removeprefix(f"pattern is {quote(text)}: ")) from None
    return text


def _checked_heads(text: str) -> str:
    if not re.fullmatch(r"whole|per-head|auto|grouped:[1-9][0-9]{0,3}", text):
        raise ValueError("expected whole, per-head, auto or grouped:G, as grouped:4")
    return text


Chain = Annotated[str, AfterValidator(_checked_pattern)]  # of Kronecker-sparse factors
Heads = Annotated[str, AfterValidator(_checked_heads)]
NONE = "none"  # switches a setting off
# Settings that choose a structure or its size
STRUCTURED = frozenset(
    {"method", "cf", "model_cf", "rank", "blocks", "pattern", "heads", "solver", "rounds", "base", "bpw"}
    | {"couplings", "allocation", "tokens_per_second"}
)


def stores_alone(data: Mapping[str, object]) -> bool:
    """Whether settings of a recipe name `quantize`, but no structure and no size, nor do its rules."""
    rules = data.get("rules")
    shaped = isinstance(rules, list) and any(_says(rule, STRUCTURED - {"method"}) for rule in rules)
    return _says(data, ("quantize",)) and not _says(data, STRUCTURED) and not shaped


def _says(settings: object, names: Collection[str]) -> bool:
    return isinstance(settings, Mapping) and any(settings.get(n) not in (None, NONE) for n in names)


INPUT, OURS = "Input should ", "Value error, "
AGAIN = "; give such a value"


def said_of(error: ErrorDetails, found: str) -> str:
    """The message for one of `ValidationError.errors()`: ``FOUND 'x', expected it to be …; give such a
    value``, or what a check of ours says. `found` is put before the value."""
    value, message = quote(repr(error["input"]), 60)[1:-1], quote(error["msg"], 240)[1:-1]
    if message.startswith(INPUT):
        return f"{found} {value}, expected it to {message.removeprefix(INPUT)}{AGAIN}"
    if error["type"] == "path_type":
        return f"{found} {value}, expected a path{AGAIN}"
    said = message.removeprefix(OURS)
    return f"{found} {value}: {said}" if isinstance(error["input"], str) else said
