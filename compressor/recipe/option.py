"""Reads options of the command line from the docstrings of settings, so that each is described once.

Behind ``Options:`` a docstring has an entry for each field that is an option. It has the field, the
option's names if they are not the field's, one sentence, and in brackets the default if that is no
value. ``{values}`` stands for the values that its type allows::

    Options:
        method (--method, -m): The structure: {values}. [svd; dense for --quantize alone]
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from blr.compressor.base.errors import UsageError

ENTRY = re.compile(r"(\w+)(?: \((-[\w, -]+)\))?: (.*?)(?: \[(.*)\])?")


TYPES = {  # by a field's type: which types its values may have, and what is expected, in words
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
}


class Limits(NamedTuple):
    """The least and the largest allowed number of a field, given in its annotation."""

    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Option:
    """A field as an option: `kind` is the type of its value, `default` the text shown as its default."""

    kind: Any
    help: str
    default: str | None
    names: tuple[str, ...]
    limits: Limits


def described(owner: object) -> str:
    """A docstring without its options."""
    return inspect.cleandoc(owner.__doc__ or "").partition("Options:\n")[0].rstrip()


@cache
def options_of(owner: object) -> dict[str, Option]:
    """The options of a model, dataclass or function, by field; its own come before inherited ones."""
    hints, found = get_type_hints(owner, include_extras=True), dict[str, Option]()
    for part in getattr(owner, "__mro__", (owner,)):
        for name, names, said, default in _entries(part.__doc__ or ""):
            dashed = tuple(names.split(", ")) if names else (f"--{name.replace('_', '-')}",)
            said = said.replace("{values}", ", ".join(map(str, get_args(hints[name]))))
            limits = _limits(hints[name]) or Limits()
            found.setdefault(name, Option(plain_type(hints[name]), said, default, dashed, limits))
    return found


def check_limits(settings: object) -> None:
    """Raise UsageError for a value of another type than its field's, and a number outside of its
    `Limits`."""
    owner: object = type(settings)
    for name, option in options_of(owner).items():
        value, (least, most) = getattr(settings, name), option.limits
        _check_type(name, value, option.kind, getattr(owner, name, None) is None)
        low, high = -inf if least is None else least, inf if most is None else most
        if value is not None and option.limits != Limits() and not low <= value <= high:
            found = f"{option.names[0]} {value:g}"
            raise UsageError(f"{found}: expected a number from {low:g} to {high:g}")


def _check_type(name: str, value: object, kind: object, optional: bool) -> None:
    if kind in TYPES and not (value is None and optional):
        types, expected = TYPES[kind]
        if type(value) not in types:
            raise UsageError(f"{name}={value!r}: expected {expected}")


def plain_type(hint: object) -> object:
    """The type of a value that is given in place of None: int for ``Annotated[Positive, …] | None``."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if origin is Annotated:
        return plain_type(inner[0])
    if origin in (list, tuple):
        return list[plain_type(inner[0])]  # type: ignore[misc]
    if origin is None:
        return hint
    return type(inner[0]) if type(inner[0]) in (str, int) else plain_type(inner[0])  # Literal, or union


def _entries(text: str) -> list[tuple[str, ...]]:
    """Field, names, sentence and default of every entry in a docstring."""
    said = re.split(r"\n(?=\S)", inspect.cleandoc(text).partition("Options:\n")[2])[0]
    lines = re.sub(r"\n {5,}", " ", said).splitlines()
    return [match.groups() for line in lines if (match := ENTRY.fullmatch(line.strip()))]


def _limits(hint: object) -> Limits | None:
    """The first `Limits` in an annotation."""
    parts = [hint, *get_args(hint), *getattr(hint, "__metadata__", ())]
    inner = (part if isinstance(part, Limits) else part is not hint and _limits(part) for part in parts)
    return next((found for found in inner if found), None)
