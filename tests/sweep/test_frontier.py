"""What points of a sweep say."""

from __future__ import annotations

from blr.compressor.sweep.frontier import Found, over_seeds


def test_one_seed_of_several_has_no_spread() -> None:
    """The others failed: 0 would say that seeds agree."""
    found = Found("svd-cf2-seed0", "svd", False, 0.0, 8.0, (0.5,), None, ("blr",))
    one = over_seeds([found], "svd-cf2")
    assert (one.name, one.losses, one.spread) == ("svd-cf2", (0.5,), None)
