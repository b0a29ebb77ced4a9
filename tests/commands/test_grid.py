"""The points of a sweep: no list is left out of it in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blr.compressor.base.errors import UsageError
from blr.compressor.commands.sweep.grid import Grid, listed, points_of


@pytest.mark.parametrize("methods", [("svd-pivot",), ("svd", "svd-pivot")])
def test_pivots_without_a_factor_are_refused(methods: tuple[str, ...]) -> None:
    """They correct no base: their points would be missing."""
    grid = Grid(methods, (), bases=("int2",), ranks=(8,), plain=("int4",))
    with pytest.raises(UsageError, match=r"--methods svd-pivot: pivots correct no base.*give that"):
        points_of(grid, {}, calibrated=False)


def test_a_base_that_no_method_corrects_is_refused() -> None:
    grid = Grid(("svd-pivot",), (2.0,), bases=("int2",), ranks=(8,))
    with pytest.raises(UsageError, match="--base is for methods without pivots to correct; name one"):
        points_of(grid, {}, calibrated=False)


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
