"""Options of a command, made of the fields of its settings: type, default, help and limits."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.recipe.option import Option, option_fields, plain_type
from blr.compressor.recipe.schema import Recipe

CHECKS = {int: values.count, float: values.number, Path: values.place}  # of values, by type
NAMED_CHECKS = {
    **{"seed": values.seed, "device": values.device, "max_shard_size": values.size},
    **{"data": values.place, "text": values.place, "train": values.listed, "dtype": values.dtype},
}


def recipe_options(
    names: Collection[str] = (), first: Iterable[str] = (), hidden: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Options of the recipe's fields: all, or those of these `names`, some of them `first`. The recipe
    checks what is typed; what is not is None."""
    found = option_fields(Recipe)
    order = [*first, *(name for name in found if name not in first)]
    chosen = [name for name in order if name in (names or found)]
    return [_parameter(name, *found[name], None, hidden=name in hidden) for name in chosen]


def setting_options(owner: Any) -> list[inspect.Parameter]:
    """Options of the fields of a dataclass, its own before those it inherits, with its defaults; what is
    typed is checked at once."""
    defaults = {field.name: field.default for field in fields(owner)}
    found, own = option_fields(owner), inspect.get_annotations(owner)
    order = sorted(found, key=lambda name: name not in own)
    return [_parameter(n, *found[n], defaults[n], callback=_check(n, found[n][0])) for n in order]


def _check(name: str, hint: Any) -> Any:
    return NAMED_CHECKS.get(name) or CHECKS.get(plain_type(hint))


def typed(option: Option, *names: str, **more: Any) -> Any:
    """An option of typer by these names, or those of the parameter; `more` of what typer takes."""
    limits: dict[str, Any] = {"min": option.least, "max": option.most}
    more |= {"help": option.help, "show_default": option.default or True}
    return typer.Option(..., *names, **limits, **more)


def _parameter(name: str, hint: Any, option: Option, default: Any, **more: Any) -> inspect.Parameter:
    kind, names = plain_type(hint), option.names or (f"--{name.replace('_', '-')}",)
    if kind is bool and default is not False:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    if option.typed is not None:
        kind, default = str, option.typed
    default = None if default == () else default
    taken: Any = Annotated[kind if default is not None else kind | None, typed(option, *names, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken)
