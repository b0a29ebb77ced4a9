"""The types of a recipe's fields: what a number, a glob or a chain may be."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from blr.compressor.base.errors import UsageError
from blr.compressor.base.globs import MAX_GLOB, MAX_GLOBS
from blr.compressor.structures.patterns import check_pattern

Bits = Annotated[float, Field(gt=0.0, le=32.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
CacheFactor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]  # 1: all of it, for --kv-quantize
Positive = Annotated[int, Field(ge=1, le=2**31)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Glob = Annotated[str, Field(min_length=1, max_length=MAX_GLOB)]
Globs = Annotated[list[Glob], Field(max_length=MAX_GLOBS)]


def _checked_pattern(text: str) -> str:
    try:
        check_pattern(text)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return text


def _checked_heads(text: str) -> str:
    if not re.fullmatch(r"whole|per-head|auto|grouped:[1-9][0-9]{0,3}", text):
        raise ValueError("expected whole, per-head, auto or grouped:G, as grouped:4")
    return text


Chain = Annotated[str, AfterValidator(_checked_pattern)]  # Kronecker-sparse, of some layer
Heads = Annotated[str, AfterValidator(_checked_heads)]
