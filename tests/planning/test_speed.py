"""The bits that a speed leaves: as many as there can be, and a refusal where none are few enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.planning import sizing
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.planning.sizing import paced, tokens_per_second
from blr.compressor.recipe.schema import Recipe, make_recipe
from configs import LARGE

L4, H200 = find_gpu("l4"), find_gpu("h200")
KINDS = ("int8", "int4", "int3", "int2")


@pytest.fixture
def large(tmp_path: Path) -> Source:
    """Two blocks as wide as an 8B's, by their config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 2}))
    return open_or_outline(tmp_path)[0]


def test_no_token_is_faster_than_its_launches(tiny: Path) -> None:
    """Four blocks of nine, at 4 to 5 microseconds each: whatever the weights are stored in."""
    source = open_source(tiny)
    for recipe in (Recipe(quantize="int3"), Recipe(method="svd", base="int2", rank=16), Recipe(cf=4.0)):
        found = tokens_per_second(source, recipe, H200, False)
        assert found is not None and 1e6 / (4 * 9 * 5) <= found <= 1e6 / (4 * 9 * 4)


def test_a_speed_takes_the_most_bits_that_reach_it(large: Source) -> None:
    """On a GPU whose memory is slow for its arithmetic, so that fewer bits are faster."""
    source = large
    assert paced(source, (plain := Recipe(cf=2.0)), False) == (plain, "")
    bases = [Recipe(method="dense", quantize=kind) for kind in KINDS]
    speeds = [tokens_per_second(source, base, L4, False) or 0.0 for base in bases]
    assert speeds == sorted(speeds)
    found = []
    for wanted in (0.5 * speeds[0], speeds[1], speeds[2], speeds[3]):
        asked = Recipe(method="blast", solver="varpro", gpu="l4", tokens_per_second=wanted)
        recipe, said = paced(source, asked, False)
        assert f"{wanted:g} tokens/s" in said and recipe.tokens_per_second is None
        assert (tokens_per_second(source, recipe, L4, False) or 0) >= wanted
        found.append(make_plan(source, recipe).bits)
    assert found == sorted(found, reverse=True) and len(set(found)) == 4
    with pytest.raises(UsageError, match="fastest on l4 is method dense quantize int2, predicted"):
        paced(source, Recipe(gpu="l4", tokens_per_second=2 * speeds[3]), False)


def test_bits_that_are_no_faster_are_not_taken(large: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where unpacking three and two bits takes longer than reading four."""
    monkeypatch.setattr(sizing, "UNPACKED", {4: 19.0, 3: 7.7, 2: 15.2})
    source = large
    bases = [Recipe(method="dense", quantize=kind) for kind in KINDS]
    speeds = [tokens_per_second(source, base, H200, False) or 0.0 for base in bases]
    assert max(speeds) == speeds[1]
    recipe, _ = paced(source, Recipe(tokens_per_second=speeds[1]), False)
    assert recipe.quantize == "int4"
    with pytest.raises(UsageError, match="fastest on h200 is method dense quantize int4, predicted"):
        paced(source, Recipe(tokens_per_second=1.01 * speeds[1]), False)


def test_predictions_are_near_what_an_8b_decodes_at_on_an_h200(tmp_path: Path) -> None:
    """Tokens a second, by `blr bench decode --models 8b`; predictions leave attention and norms out."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    source, _ = open_or_outline(tmp_path)
    measured = {
        "int4": (Recipe(method="dense", quantize="int4"), 558.0),
        "int2": (Recipe(method="dense", quantize="int2"), 655.8),
        "int2 + low rank": (Recipe(method="svd", base="int2", rank=16), 610.1),
        "int3 + low rank": (Recipe(method="svd", base="int3", rank=16), 503.7),
    }
    for name, (recipe, wanted) in measured.items():
        found = tokens_per_second(source, recipe, H200, False)
        assert found == pytest.approx(wanted, rel=0.2), name


def test_a_setting_of_none_is_none(tiny: Path) -> None:
    """As a recipe takes back what the one says that it extends."""
    source = open_source(tiny)
    asked = Recipe(method="svd", quantize=None, base=None, bpw=None, tokens_per_second=500.0)
    assert paced(source, asked, False)[0].quantize == "int8"


def test_a_cache_of_ranks_is_not_beside_a_speed() -> None:
    """It would need a size, which a speed refuses."""
    with pytest.raises(UsageError, match="chooses what is stored; leave out kv_quantize"):
        make_recipe(tokens_per_second=500.0, kv_quantize="int8")


def test_what_cannot_be_planned_at_all_is_told_as_it_is(tiny: Path) -> None:
    """Not as a speed of 0, for which a faster GPU would be the remedy."""
    source = open_source(tiny)
    asked = Recipe(method="svd", tokens_per_second=500.0, include=["no_such_layer"])
    with pytest.raises(UsageError, match="'no_such_layer' matches no"):
        paced(source, asked, False)
