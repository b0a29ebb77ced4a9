"""Ranks of a cache of keys and values: one budget for all layers, spent where it saves most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pico import save_pico

from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import Plan, cache_notes, make_plan
from blr.compressor.planning.rank_caches import FLOOR
from blr.compressor.recipe.schema import Recipe

MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "head_dim": 64},
    **{"intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64},
}


def planned(
    folder: Path, kv_heads: int, curves: dict[str, list[float]] | None, **recipe: object
) -> Plan:
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_key_value_heads": kv_heads}))
    source, _ = open_or_outline(folder)
    return make_plan(source, Recipe(method="dense", **recipe), curves, calibrated=curves is not None)


def held(plan: Plan) -> dict[str, int]:
    return {p.layer.module: p.spec.groups * p.spec.rank for p in plan.layers}


@pytest.mark.parametrize(
    ("heads", "asked", "groups"),
    [(2, "whole", 1), (8, "whole", 2), (8, "per-head", 8), (8, "grouped:4", 4)],
)
def test_heads_share_ranks(heads: int, asked: str, groups: int, tmp_path: Path) -> None:
    """Groups of 256 features unless the recipe says otherwise."""
    plan = planned(tmp_path, heads, None, kv_cf=2.0, heads=asked)
    assert {p.spec.groups for p in plan.layers} == {groups}
    assert set(held(plan).values()) == {heads * 64 // 2}


def test_one_budget_goes_where_it_saves_most(tmp_path: Path) -> None:
    modules = held(planned(tmp_path, 2, None, kv_cf=2.0))
    curves = {
        name: [(10.0 if "v_proj" in name else 1.0) * 0.95**n for n in range(128)] for name in modules
    }
    found = held(planned(tmp_path, 2, curves, kv_cf=2.0))
    assert sum(found.values()) == sum(modules.values())
    for number in "01":
        keys, values = (found[f"model.layers.{number}.self_attn.{n}_proj"] for n in "kv")
        worth = [curves[n][found[n] - 1] for n in found]  # of the last rank: alike everywhere
        assert keys < values and max(worth) < 1.5 * min(worth)


def test_nothing_falls_below_the_floor_or_above_the_width(tmp_path: Path) -> None:
    modules = held(planned(tmp_path, 2, None, kv_cf=1.5))
    curves = {name: [1e6 if "v_proj" in name else 1e-6] * 128 for name in modules}
    found = held(planned(tmp_path, 2, curves, kv_cf=1.5))
    assert {n for name, n in found.items() if "v_proj" in name} == {128}
    assert all(n >= FLOOR * 128 for n in found.values())


def test_the_loss_is_predicted(tmp_path: Path) -> None:
    """Half of what is left of the curves, a token."""
    modules = held(planned(tmp_path, 2, None, kv_cf=2.0))
    curves = {name: [1.0] * 128 for name in modules}
    plan = planned(tmp_path, 2, curves, kv_cf=2.0)
    lost = 4 * 64 / 2 / 80**2
    [note] = cache_notes(plan, curves, 80)
    assert "2.00 times smaller" in note and f"about {lost:.2g} nats" in note
    assert not cache_notes(planned(tmp_path, 2, None, quantize="int8"), curves, 80)


def test_sizes_are_said_without_calibration(tmp_path: Path) -> None:
    """Two layers' keys and values of 128 features in bf16, scales and all."""
    notes = planned(tmp_path, 2, None, kv_cf=1.0, kv_quantize="int4").notes
    said = "3.05 times smaller, 1,024 -> 336 bytes a token"
    assert [note for note in notes if "cache" in note] == [f"cache of keys and values: {said}"]


def test_bits_of_a_base_do_not_size_what_is_cached(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_key_value_heads": 8}))
    source, _ = open_or_outline(tmp_path)
    plan = make_plan(source, Recipe(method="svd", base="int3", bpw=6.0, kv_rank=8))
    cached = [p for p in plan.layers if p.layer.type in ("k_proj", "v_proj")]
    assert cached and {p.spec.plain.rank for p in cached} == {8}


def test_projections_of_unknown_heads_are_planned(tmp_path: Path) -> None:
    """As GPT-BigCode's, whose keys and values are one head of their own."""
    folder = save_pico("gpt2", tmp_path / "gpt2")
    config = json.loads((folder / "config.json").read_text())
    source, _ = open_or_outline(folder)
    single = replace(source, config={**config, "n_head": 5})  # which does not divide the width
    plan = make_plan(single, Recipe(method="dense", kv_rank=2))
    assert plan.layers and {p.spec.plain.groups for p in plan.layers} == {1}


@pytest.mark.parametrize("heads", ["whole", "per-head", "grouped:4", "grouped:1"])
def test_queries_share_no_group_with_keys(heads: str, tmp_path: Path) -> None:
    source, _ = open_or_outline(save_pico("gpt2", tmp_path / "gpt2"))
    plan = make_plan(source, Recipe(method="dense", kv_rank=2, heads=heads))
    assert plan.layers and all(p.spec.plain.groups % 3 == 0 for p in plan.layers)
