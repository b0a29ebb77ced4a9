"""What points of a sweep say."""

from __future__ import annotations

from dataclasses import replace

from blr.compressor.commands.sweep.page import MadePoint, over_seeds


def test_one_seed_of_several_has_no_spread() -> None:
    """The others failed: 0 would say that seeds agree."""
    found = MadePoint("svd-cf2-seed0", "svd", False, 0.0, 8.0, (0.5,), None, ("blr",))
    one = over_seeds([found], "svd-cf2")
    assert (one.name, one.losses, one.spread) == ("svd-cf2", (0.5,), None)


def test_bits_of_several_seeds_are_their_mean_as_losses_are() -> None:
    """Sensitivities give other ranks with another seed; equal bits stay what they are."""
    found = MadePoint("svd-cf2-seed0", "svd", False, 0.0, 10.8758, (0.5,), None, ("blr",), bytes=100)
    other = replace(found, name="svd-cf2-seed1", bits=10.9023, bytes=104)
    one = over_seeds([found, other], "svd-cf2")
    assert (one.bits, one.bytes) == (10.88905, 102)
    assert over_seeds([found] * 3, "svd-cf2").bits == found.bits
