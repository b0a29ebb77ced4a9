"""Options that two commands have in common: what they say of a recipe, and one command's for another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, get_args

from blr.compressor.base.errors import UsageError

if TYPE_CHECKING:
    from blr.compressor.recipe.schema import Recipe

Command = Callable[..., None]


def asked_recipe(options: Mapping[str, Any], calibrated: bool, apart: Collection[str] = ()) -> Recipe:
    """The recipe that a command's `options` name and change, by parameter.

    Args:
        calibrated: whether there is a text to fit to. apart: options that the command itself uses.

    Raises UsageError for options that nothing would use, RecipeError as `load_recipe`.
    """
    from blr.compressor.healing.settings import SELF
    from blr.compressor.recipe.schema import Recipe
    from blr.compressor.recipe.shipped_recipes import load_recipe
    from blr.compressor.recipe.unused_settings import refuse_idle

    said = {name: value for name, value in options.items() if name in Recipe.model_fields}
    asked = {name: value for name, value in said.items() if value is not None and value != []}
    recipe = load_recipe(options["recipe"], asked)
    refuse_idle(recipe, {name: value for name, value in asked.items() if name not in apart}, calibrated)
    if options["mix"] is not None and options["calibration"] == SELF:
        raise UsageError(
            f"--mix {options['mix']:g} is beside a text of yours, not --text self; leave one of them out"
        )
    return recipe


def taking_options_of(other: Command, hidden: Collection[str]) -> Callable[[Command], Command]:
    """Decorates a command that takes all options of another beside its own, so that a line typed for
    one is taken by both: they come as its keyword arguments, those `hidden` are not in its help."""

    def decorated(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        theirs = inspect.signature(other, eval_str=True).parameters
        merged = {name: _hidden(found) if name in hidden else found for name, found in theirs.items()}
        merged |= {n: p for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        command.__signature__ = own.replace(parameters=list(merged.values()))  # type: ignore[attr-defined]
        return command

    return decorated


def _hidden(option: inspect.Parameter) -> inspect.Parameter:
    kind, info = get_args(option.annotation)
    info = copy(info)
    info.hidden = True
    return option.replace(annotation=Annotated[kind, info])
