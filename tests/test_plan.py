"""From a recipe and headers to specs: budgets are met, and what cannot be is refused or said."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pico import save_pico

from blr.compressor.budget import fit_ranks
from blr.compressor.checkpoint.source import open_source
from blr.compressor.errors import UsageError
from blr.compressor.plan import Plan, make_plan
from blr.compressor.recipe import make_recipe

LLAMA_7B = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
sizes = st.integers(4, 64).map(lambda n: 16 * n)


def plan(folder: Path, **settings: object) -> Plan:
    return make_plan(open_source(folder), make_recipe(**settings))


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
@pytest.mark.parametrize("cf", [1.25, 2.0])
def test_achieved_cf_is_within_two_percent(tiny: Path, method: str, cf: float) -> None:
    assert plan(tiny, method=method, cf=cf).cf == pytest.approx(cf, rel=0.02)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=8), st.sampled_from([1.25, 2.0, 4.0]))
def test_ranks_meet_the_budget_within_one_percent(shapes: list[tuple[int, int]], cf: float) -> None:
    ranks = fit_ranks(shapes, cf, cost=sum, step=lambda shape: 1)
    spent = sum(ranks[shape] * sum(shape) for shape in shapes)
    assert spent == pytest.approx(sum(map(prod, shapes)) / cf, rel=0.03)


def test_large_ranks_are_multiples_that_kernels_like() -> None:
    ranks = fit_ranks(LLAMA_7B, 2.0, cost=lambda s: sum(s) + 256, step=lambda shape: 1)
    spent = sum(ranks[shape] * (sum(shape) + 256) for shape in LLAMA_7B)
    assert spent == pytest.approx(sum(map(prod, LLAMA_7B)) / 2, rel=0.01)
    assert all(rank % 16 == 0 for rank in ranks.values())


def test_papers_ranks_follow_from_cf_2() -> None:
    ranks = fit_ranks(LLAMA_7B, 2.0, cost=sum, step=lambda shape: 1)
    assert ranks[4096, 4096] == 1024
    assert ranks[11008, 4096] == pytest.approx(1488, abs=16)


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
    found = plan(save_pico("opt", tmp_path))
    assert len(found.layers) == 12
    assert any("has no table in configs/" in note for note in found.notes)
