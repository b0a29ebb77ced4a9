"""`--effort`: what each level sets, what wins over it, and the time that is predicted for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Invoke

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.chosen import asked_recipe
from blr.compressor.recipe.schema import Recipe

BEST = {"samples": 1600, "refit": 3, "finish": None, "rounds": None}
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "closed form": ("quick", {"method": "svd"}, {"samples": 256, "refit": 0, "finish": 0}),
    "as without": ("normal", {"method": "blast"}, {"refit": None, "finish": None, "samples": 256}),
    "best": ("best", {"method": "svd"}, BEST),
    "rounds of BLAST": ("best", {"method": "blast"}, {**BEST, "rounds": 100}),
    "few bits": ("best", {"base": "int2", "rank": 8}, {**BEST, "refit": 4}),
    "a setting wins": ("best", {"samples": 64}, {**BEST, "samples": 64}),
}


@pytest.mark.parametrize("case", SETS)
def test_a_level_sets_what_is_not_set(case: str) -> None:
    effort, settings, expected = SETS[case]
    found = asked_recipe(None, settings, calibrated=True, effort=effort)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_level_wins_over_a_recipe() -> None:
    found = asked_recipe(Recipe(method="svd", refit=7, samples=9), {}, calibrated=True, effort="best")
    assert (found.refit, found.samples) == (3, 1600)


def test_without_a_text_there_is_nothing_to_put_effort_into() -> None:
    with pytest.raises(UsageError, match="--effort quick: nothing would use it, it belongs to --text"):
        asked_recipe(None, {}, calibrated=False, effort="quick")


def test_more_effort_takes_longer(tiny: Path, invoke: Invoke) -> None:
    seconds = []
    for effort in ("quick", "normal", "best"):
        code, out, err = invoke("plan", tiny, "-m", "blast", "--effort", effort, "--format", "json")
        assert code == 0, err
        seconds.append(json.loads(out)["compress"]["seconds"])
    assert seconds == sorted(seconds) and seconds[2] > 1.2 * seconds[0]


def test_what_effort_stands_for_is_taken_and_shown(invoke: Invoke) -> None:
    shown = invoke("compress", "--help")[1]
    assert all(name in shown for name in ("--effort", "--samples", "--refit", "--finish", "--rounds"))
