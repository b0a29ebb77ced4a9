"""Makes the recipe of a run from a recipe, options that replace its settings, and an effort."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.shipped_recipes import load_recipe
from blr.compressor.recipe.unused_settings import refuse, refuse_idle

NORMAL = "normal"
EFFORTS: Mapping[str, Mapping[str, int]] = {
    "quick": {"refit": 0, "finish": 0},  # no training
    NORMAL: {},  # the defaults of the device
    "best": {"samples": 1600, "refit": 3, "rounds": 100},  # those of the README's best figures
}
PACKED = {"best": {"refit": 4}}  # replaces the above for weights in few bits
ROUNDED = "blast"  # the method that `rounds` above is for


def asked_recipe(
    recipe: Recipe | str | Path | None,
    settings: Mapping[str, Any],
    calibrated: bool,
    effort: str | None = None,
    own_text: bool = False,
    apart: Collection[str] = (),
) -> Recipe:
    """`recipe` with the `settings` that are given (not None, not empty) in place of its own, and with
    those of `effort` where neither says anything else. `calibrated`: there is a text to fit to;
    `own_text`: the model writes it; `apart` are settings that always have a use. Raises UsageError for
    settings that nothing would use, RecipeError as `load_recipe` does."""
    asked = {n: v for n, v in settings.items() if v is not None and v != [] and v != ()}
    found = load_recipe(recipe, asked)
    refuse_idle(found, {n: v for n, v in asked.items() if n not in apart}, calibrated)
    if own_text and "mix" in asked:
        raise UsageError(
            f"--mix {asked['mix']:g} is beside a text of yours, not --text self; leave one of them out"
        )
    if effort is None:
        return found
    if not calibrated:
        refuse("effort", effort, "--calibration")
    return load_recipe(recipe, {**effort_settings(effort, found), **asked})


def effort_settings(effort: str, recipe: Recipe) -> dict[str, int]:
    """The settings of `effort` for a `recipe` that is complete otherwise. Raises UsageError if it is
    unknown."""
    if effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: expected one of {', '.join(EFFORTS)}")
    own, found = recipe.own(), dict(EFFORTS[effort])
    if own.stored.bits or own.stored.base:
        found |= PACKED.get(effort, {})
    if own.method != ROUNDED:
        found.pop("rounds", None)
    return found
