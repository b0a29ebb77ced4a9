"""Options of a command, made of the fields of its settings (`recipe/option`)."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.recipe.option import Option, options_of
from blr.compressor.recipe.schema import Recipe

CHECKS = {int: values.count, float: values.number, Path: values.place}  # of values, by type
NAMED_CHECKS = {
    **{"seed": values.seed, "device": values.device, "max_shard_size": values.size},
    **{"data": values.place, "text": values.place, "train": values.listed},
}
TYPED = {"max_shard_size": "5GB"}  # defaults as one would type them


def recipe_options(names: Collection[str] = (), hidden: Collection[str] = ()) -> list[inspect.Parameter]:
    """Options of the recipe's fields: all, or those of these `names`. The recipe checks what is typed;
    what is not is None."""
    return [
        _parameter(name, option, None, hidden=name in hidden)
        for name, option in options_of(Recipe).items()
        if name in (names or Recipe.model_fields)
    ]


def setting_options(owner: Any) -> list[inspect.Parameter]:
    """Options of the fields of a dataclass, with its defaults; what is typed is checked at once."""
    defaults = {field.name: TYPED.get(field.name, field.default) for field in fields(owner)}
    return [
        _parameter(n, o, defaults[n], callback=NAMED_CHECKS.get(n) or CHECKS.get(o.kind))
        for n, o in options_of(owner).items()
    ]


def typed(owner: type, name: str, *names: str) -> Any:
    """An option of typer like that of a field, for parameters that are checked as such fields are."""
    option = options_of(owner)[name]
    return _info(option, names, callback=NAMED_CHECKS.get(name) or CHECKS.get(option.kind))


def _parameter(name: str, option: Option, default: Any, **more: Any) -> inspect.Parameter:
    kind, names = option.kind, option.names
    if kind is bool and default is not False:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    if isinstance(default, tuple):
        default = ",".join(default) or None
    if isinstance(default, str):
        kind = str
    info: Any = _info(option, names, **more)
    taken: Any = Annotated[kind if default is not None else kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken)


def _info(option: Option, names: Collection[str], **more: Any) -> Any:
    least, most = option.limits
    more |= {"help": option.help, "show_default": option.default or True, "min": least, "max": most}
    return typer.Option(..., *names, **more)
