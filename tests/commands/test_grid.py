"""The points of a sweep: no list is left out of it in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blr.compressor.commands.sweep.run import listed


@pytest.mark.parametrize("option", ["--methods", "--quantize", "--heal"])
def test_an_empty_list_is_refused_where_points_need_one(
    option: str, invoke: Callable[..., tuple[int, str, str]]
) -> None:
    """As of a variable that is not set: the points of --cf would be missing."""
    given = ("sweep", "model", "-o", "out", "--eval", "text.txt", "--cf", "2", option, "")
    code, _, said = invoke(*given)
    assert code == 2 and f"{option} is empty: expected a list; check the variable" in said


def test_lists_may_be_empty_where_nothing_is_asked_for() -> None:
    assert listed("--cf", "", float) == ()
