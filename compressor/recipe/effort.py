"""How much work a calibrated compression does, in one word: what it sets of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.schema import Recipe

NORMAL = "normal"
EFFORTS: Mapping[str, Mapping[str, int]] = {
    "quick": {"refit": 0, "finish": 0},  # closed form alone
    NORMAL: {},  # what the device is good for: the defaults of refit and finish
    "best": {"samples": 1600, "refit": 3, "rounds": 100},  # the README's best figures
}
PACKED = {"best": {"refit": 4}}  # of weights in few bits, in place of the above
ROUNDED = "blast"  # the method whose rounds these are


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
