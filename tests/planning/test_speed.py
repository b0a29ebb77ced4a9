"""The bits that a speed leaves: as many as there can be, and a refusal where none are few enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from blr.compressor.checkpoint.source import open_source
from blr.compressor.errors import UsageError
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.planning.speed import paced, tokens_per_second
from blr.compressor.recipe.schema import Recipe

H200 = find_gpu("h200")


def test_a_speed_takes_the_most_bits_that_reach_it(tiny: Path) -> None:
    source = open_source(tiny)
    assert paced(source, (plain := Recipe(cf=2.0)), False) == (plain, "")
    bases = [Recipe(method="dense", quantize=kind) for kind in ("int8", "int4", "int3", "int2")]
    speeds = [tokens_per_second(source, base, H200, False) or 0.0 for base in bases]
    assert speeds == sorted(speeds)
    found = []
    for wanted in (0.5 * speeds[0], speeds[1], (speeds[1] + speeds[2]) / 2, speeds[3]):
        recipe, said = paced(source, Recipe(method="blast", tokens_per_second=wanted), False)
        assert f"{wanted:g} tokens/s" in said and recipe.tokens_per_second is None
        assert (tokens_per_second(source, recipe, H200, False) or 0) >= wanted
        found.append(make_plan(source, recipe).bits)
    assert found == sorted(found, reverse=True) and len(set(found)) == 4
    with pytest.raises(UsageError, match="at best on h200"):
        paced(source, Recipe(tokens_per_second=2 * speeds[3]), False)
