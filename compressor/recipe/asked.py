"""The recipe of one run: a recipe, what is asked for in its place, and how much effort."""

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
    "quick": {"refit": 0, "finish": 0},  # closed form alone
    NORMAL: {},  # what the device is good for: the defaults of refit and finish
    "best": {"samples": 1600, "refit": 3, "rounds": 100},  # the README's best figures
}
PACKED = {"best": {"refit": 4}}  # of weights in few bits, in place of the above
ROUNDED = "blast"  # the method whose rounds these are


def asked_recipe(
    recipe: Recipe | str | Path | None,
    settings: Mapping[str, Any],
    calibrated: bool,
    effort: str | None = None,
    own_text: bool = False,
    apart: Collection[str] = (),
) -> Recipe:
    """`recipe` with the `settings` that are given (not None, not empty) in the place of its own, over
    those of `effort`. `calibrated`: there is a text to fit to; `own_text`: it is the model's own;
    `apart` are settings of use in any case. Raises UsageError for settings that nothing would use,
    RecipeError as `load_recipe`."""
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
    """What `effort` sets for a `recipe` that is resolved otherwise. Raises UsageError for no such."""
    if effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: expected one of {', '.join(EFFORTS)}")
    own, found = recipe.own(), dict(EFFORTS[effort])
    if own.stored.bits or own.stored.base:
        found |= PACKED.get(effort, {})
    if own.method != ROUNDED:
        found.pop("rounds", None)
    return found
