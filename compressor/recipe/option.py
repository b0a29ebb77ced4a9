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
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.fields import AGAIN, said_of

# The ends of a range in words, by pydantic's names.
ENDS = {"ge": "of at least", "gt": "over", "le": "at most", "lt": "below"}
ENTRY = re.compile(r"(\w+)(?: \((-[\w, -]+)\))?: (.*?)(?: \[(.*)\])?")


@dataclass(frozen=True)
class Option:
    """A field as an option. `kind` is the type of its value, `default` the text shown as its default.
    `least` and `most` are of `_limits`."""

    kind: Any
    help: str
    default: str | None
    names: tuple[str, ...]
    least: float | None = None
    most: float | None = None


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
            option = Option(plain_type(hints[name]), said, default, dashed, *_limits(hints[name]))
            found.setdefault(name, option)
    return found


def check_limits(settings: object) -> None:
    """Raise UsageError for a value that does not fit the annotation of its field."""
    owner: type = type(settings)
    hints = get_type_hints(owner, include_extras=True)
    for name, option in options_of(owner).items():
        strict = option.kind in (bool, int, float, str)  # else paths may be text
        check_value(option.names[0], getattr(settings, name), hints[name], strict, name)


def check_value(option: str, value: Any, hint: Any, strict: bool = True, field: str = "") -> None:
    """Raise UsageError for a `value` of an option that does not fit an annotation. field: its name in
    Python, from where alone a value of another type can come."""
    try:
        TypeAdapter(hint).validate_python(value, strict=strict)
    except ValidationError as error:
        found = error.errors()[0]
        if found.get("ctx", {}).keys() & ENDS.keys():
            ends = " and ".join(f"{ENDS[end]} {bound:g}" for end, bound in _bounds(hint).items())
            raise UsageError(f"{option} is {value:g}, expected a number {ends}{AGAIN}") from None
        name = field if field and found["type"].endswith("_type") else option
        raise UsageError(said_of(found, f"{name} is")) from None


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


def _bounds(hint: object) -> dict[str, float]:
    """The ends of the numbers that an annotation allows, by the names of `ENDS`."""
    parts = [part for kind in (hint, *get_args(hint)) for part in getattr(kind, "__metadata__", ())]
    found = [bound for part in parts if isinstance(part, FieldInfo) for bound in part.metadata]
    return {end: getattr(bound, end) for end in ENDS for bound in found if hasattr(bound, end)}


def _limits(hint: object) -> list[float | None]:
    """The least and the largest number of an annotation, as the help shows them. None for a range whose
    end is left out, which `check_value` tells."""
    bounds = _bounds(hint)
    return [] if "ge" not in bounds or "lt" in bounds else [bounds["ge"], bounds.get("le")]
