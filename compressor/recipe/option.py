"""What a setting says of itself: help, shown default, limits. The command line is made of these."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from blr.compressor.base.errors import UsageError

HERE = "this machine's, else h200"  # the GPU that something is for, where none is named


@dataclass(frozen=True)
class Option:
    """An annotation of a field: how whoever types a command sees it.

    Attributes:
        help: one sentence. default: is shown as the default, where the field's own says too little.
        names: the option's names where they are not made of the field's, as ``("--method", "-m")``.
        least, most: limits of a number, allowed themselves. typed: the default of what is read from
            text, as 5GB.
    """

    help: str
    default: str | None = None
    names: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    typed: str | None = None


def option_fields(owner: type) -> dict[str, tuple[Any, Option]]:
    """The fields of a model or dataclass that are options: name to annotated type and option."""
    found = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        told = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Option)]
        found.update({name: (hint, told[0])} if told else {})
    return found


def plain_type(hint: Any) -> Any:
    """What a value given in place of None is: of ``Annotated[Positive, …] | None`` it is int."""
    origin, inner = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if origin is Annotated:
        return plain_type(inner[0])
    if origin in (list, tuple):
        return list[plain_type(inner[0])]  # type: ignore[misc]
    if origin is None:
        return hint
    return type(inner[0]) if type(inner[0]) in (str, int) else plain_type(inner[0])  # Literal, or union


def check_limits(settings: Any) -> None:
    """Raise UsageError for a number outside of the limits of its `Option`."""
    for name, (_, option) in option_fields(type(settings)).items():
        value, least, most = getattr(settings, name), option.least, option.most
        low, high = -inf if least is None else least, inf if most is None else most
        if value is not None and (least, most) != (None, None) and not low <= value <= high:
            typed = (option.names or (f"--{name.replace('_', '-')}",))[0]
            raise UsageError(f"{typed} {value:g}: expected a number from {low:g} to {high:g}")
