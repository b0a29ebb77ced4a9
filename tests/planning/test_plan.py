"""From a recipe and headers to specs: budgets are met, and what cannot be is refused or said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pico import save_pico

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.recipe.schema import Recipe, make_recipe

pytestmark = pytest.mark.fast


def plan(folder: Path, **settings: object) -> Plan:
    return make_plan(open_source(folder), make_recipe(**settings))


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
@pytest.mark.parametrize("cf", [1.25, 2.0])
def test_achieved_cf_is_within_one_percent(tiny: Path, method: str, cf: float) -> None:
    assert plan(tiny, method=method, cf=cf).cf == pytest.approx(cf, rel=0.01)


def test_blocks_that_do_not_divide_take_the_nearest_and_say_so(tiny: Path) -> None:
    found = plan(tiny, method="blast", blocks=7)
    assert {planned.spec.to_dict()["blocks"] for planned in found.layers} == {8}
    assert any("7 blocks do not divide" in note for note in found.notes)


def test_globs_select_layers(tiny: Path) -> None:
    found = plan(tiny, include=["*.mlp.*"], exclude=["*.0.*"])
    modules = [planned.layer.module for planned in found.layers]
    assert len(modules) == 9
    assert all(".mlp." in module and ".layers.0." not in module for module in modules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["*.nothing"]}, "matches no compressible layer"),
        ({"exclude": ["*"]}, "no layer is left"),
        ({"cf": 1000.0}, "at most cf"),
        ({"cf": 40.0, "method": "monarch", "blocks": 16}, "at most cf"),
        ({"method": "ks", "pattern": "(1,2,3"}, "pattern"),
    ],
)
def test_what_cannot_be_is_refused(tiny: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(tiny, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cf": 1.0}, "cf is 1.0"),
        ({"cf": float("nan")}, "cf is nan"),
        ({"method": "magic"}, "method is 'magic'"),
        ({"blocks": 0}, "blocks is 0"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_settings_are_validated(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_recipe(**arguments)


def test_heads_stay_dense_unless_asked(tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path)
    assert all(p.layer.module != "lm_head" for p in plan(folder).layers)
    assert [p.layer.module for p in plan(folder, include=["lm_head"]).layers] == ["lm_head"]


def test_an_unknown_family_is_discovered_and_said(tmp_path: Path) -> None:
    found = plan(save_pico("electra", tmp_path))
    assert len(found.layers) == 12
    assert any("has no table in configs/" in note for note in found.notes)


@pytest.mark.parametrize("said", [None, True])
def test_heads_that_are_no_embedding_are_layers(said: bool | None, tmp_path: Path) -> None:
    """A family ties its `lm_head` alone: poolers and classifiers are weights of their own."""
    source = open_source(save_pico("bert", tmp_path / "bert"))
    config = {k: v for k, v in source.config.items() if k != "tie_word_embeddings"}
    config |= {} if said is None else {"tie_word_embeddings": said}
    plan = make_plan(
        replace(source, config=config), Recipe(method="svd", cf=1.5, include=["*pooler.dense"])
    )
    assert [p.layer.module for p in plan.layers] == ["pooler.dense"]
