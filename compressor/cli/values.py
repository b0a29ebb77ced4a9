"""What numbers and names in options may be: wrong ones are refused before anything is read.

Used as callbacks of options. Beside the ranges that the options state they refuse what such ranges
let pass (NaN) and what no library below holds (integers of hundreds of digits). All raise UsageError.
"""

import os
import re
from collections.abc import Callable
from math import isfinite
from typing import Any

import typer
from typer.core import TyperCommand

from blr.compressor.base.device import COMPUTED
from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import is_numeral
from blr.compressor.recipe.settings import MINUTES

MOST = 2**31 - 1
COLDEST = 1e-4  # a temperature below it takes logits out of the range of float32
SEEDS = range(-(2**63), 2**64)  # what torch takes


def name(param: typer.CallbackParam, value: str | None) -> str | None:
    """Of a model or folder; an empty one, of a variable that is not set, would be the current folder."""
    if value is None:
        return None
    if not value:
        raise UsageError(
            f"{param.opts[0]} is empty: expected a name or a path; check the variable it came from"
        )
    return os.path.expanduser(value)


def place(value: Any) -> Any:
    """A path, or several, with ``~`` expanded, which shells leave as it is in ``--output=~/x``."""
    if isinstance(value, list | tuple):
        return [place(one) for one in value]
    return value if value is None else type(value)(os.path.expanduser(value))


def _checked(is_right: Callable[[Any], bool], expected: str) -> Callable[..., object]:
    """A callback that refuses values other than `expected`; None passes."""

    def check(param: typer.CallbackParam, value: object) -> object:
        if value is not None and not is_right(value):
            shown = f"{value:g}" if isinstance(value, float) else str(value)[:40]
            raise UsageError(f"{param.opts[0]} is {shown}: expected {expected}")
        return value

    return check


count = _checked(lambda n: abs(n) <= MOST, f"at most {MOST}")
number = _checked(isfinite, "a finite number")
probability = _checked(lambda p: 0 < p <= 1, "a probability above 0, up to 1")
temperature = _checked(  # 0 for greedy decoding, or what logits can be divided by
    lambda t: t == 0 or (isfinite(t) and t >= COLDEST), f"0, or a finite number of at least {COLDEST:g}"
)
seed = _checked(lambda n: n in SEEDS, "an integer of 64 bits")
gpu_name = _checked(  # under which a table is kept
    lambda name: re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name, re.ASCII) is not None,
    "a name of letters, digits, _ and -",
)


def factor(value: float | None) -> float | None:
    """A compression factor."""
    if value is not None and not (isfinite(value) and value > 1):
        raise UsageError(f"cf is {value:g}: expected a compression factor over 1")
    return value


def listed(value: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def dtype(value: str | None) -> str | None:
    """What a model can compute in."""
    if value is not None and value not in COMPUTED:
        raise UsageError(f"dtype {value!r}: expected one of {', '.join(COMPUTED)}")
    return value


VALUES = {"--heal": f"{MINUTES:g}"}  # by option, its value where none follows


class OptionalValues(TyperCommand):
    """A command that takes the options of `VALUES` without a number, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, completed(args))


def completed(args: list[str]) -> list[str]:
    """`args` with a value for every option of `VALUES` that no number follows."""
    found = []
    for n, arg in enumerate(args):
        follows = args[n + 1] if n + 1 < len(args) else ""
        bare = arg in VALUES and not is_numeral(follows)
        found.append(f"{arg}={VALUES[arg]}" if bare else arg)
    return found
