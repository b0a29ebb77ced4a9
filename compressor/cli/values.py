"""What numbers and names in options may be: wrong ones are refused before anything is read.

Used as callbacks of options. Beside the ranges that the options state they refuse what such ranges
let pass (NaN) and what no library below holds (integers of hundreds of digits). All raise UsageError.
"""

from __future__ import annotations

import os
import re
from math import isfinite
from typing import Any

import typer

from blr.compressor.base.device import COMPUTED, check_device
from blr.compressor.base.errors import UsageError
from blr.compressor.workspace.shards import parse_size

MOST = 2**31 - 1
COLDEST = 1e-4  # a temperature below it takes logits out of the range of float32
SEEDS = range(-(2**63), 2**64)  # what torch takes


def name(param: typer.CallbackParam, value: str) -> str:
    """Of a model or folder; an empty one, of a variable that is not set, would be the current folder."""
    if not value:
        raise UsageError(
            f"{param.opts[0]} is empty: expected a name or a path; check the variable it came from"
        )
    return os.path.expanduser(value)


def optional_name(param: typer.CallbackParam, value: str | None) -> str | None:
    """A `name`, where one is given."""
    return value if value is None else name(param, value)


def place(value: Any) -> Any:
    """A path, or several, with ``~`` expanded, which shells leave as it is in ``--output=~/x``."""
    if isinstance(value, list | tuple):
        return [place(one) for one in value]
    return value if value is None else type(value)(os.path.expanduser(value))


def count(param: typer.CallbackParam, value: int | None) -> int | None:
    """An integer up to 2³¹ − 1."""
    if value is not None and abs(value) > MOST:
        _refuse(param, value, f"at most {MOST}")
    return value


def number(param: typer.CallbackParam, value: float | None) -> float | None:
    """A finite number."""
    if value is not None and not isfinite(value):
        _refuse(param, value, "a finite number")
    return value


def factor(param: typer.CallbackParam, value: float | None) -> float | None:
    """A compression factor."""
    if value is not None and not (isfinite(value) and value > 1):
        raise UsageError(f"cf is {value:g}: expected a compression factor over 1")
    return value


def probability(param: typer.CallbackParam, value: float | None) -> float | None:
    """Above 0, up to 1."""
    if value is not None and not 0 < value <= 1:
        _refuse(param, value, "a probability above 0, up to 1")
    return value


def temperature(param: typer.CallbackParam, value: float) -> float:
    """0 for greedy decoding, or what logits can be divided by."""
    if value != 0 and not (isfinite(value) and value >= COLDEST):
        _refuse(param, value, f"0, or a finite number of at least {COLDEST:g}")
    return value


def seed(param: typer.CallbackParam, value: int) -> int:
    """An integer of 64 bits."""
    if value not in SEEDS:
        _refuse(param, value, "an integer of 64 bits")
    return value


def size(value: str) -> int:
    """Bytes, as 5GB."""
    return parse_size(value)


def listed(value: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def dtype(param: typer.CallbackParam, value: str | None) -> str | None:
    """What a model can compute in."""
    if value is not None and value not in COMPUTED:
        raise UsageError(f"dtype {value!r}: expected one of {', '.join(COMPUTED)}")
    return value


def device(param: typer.CallbackParam, value: str) -> str:
    """What a model can compute on."""
    return check_device(value)


def gpu_name(param: typer.CallbackParam, value: str | None) -> str | None:
    """A name that a table is kept under."""
    if value is not None and not re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", value, re.ASCII):
        _refuse(param, value, "a name of letters, digits, _ and -")
    return value


def _refuse(param: typer.CallbackParam, value: object, expected: str) -> None:
    shown = f"{value:g}" if isinstance(value, float) else str(value)[:40]
    raise UsageError(f"{param.opts[0]} is {shown}: expected {expected}")
