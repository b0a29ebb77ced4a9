"""Groups of heads: the published thresholds, the choices they lead to, and the structure itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pico import inputs_for, save_pico
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.planning.assign import (
    groups_for_budget,
    groups_for_rank,
    memory_threshold,
    nearest_grouping,
    parameter_threshold,
)
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures import lowrank
from blr.compressor.structures.base import relative_error
from blr.compressor.structures.specs import LowRankSpec, spec_from_dict

register()

pytestmark = pytest.mark.fast

repeatable = settings(max_examples=25)
grouped = st.builds(
    lambda groups, rows, columns, rank, side: LowRankSpec(
        groups * columns, groups * rows, rank, groups, side
    ),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(2, 5),
    st.integers(1, 6),
    st.sampled_from(["out", "in"]),
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_of(size: int, tokens: int, seed: int = 1) -> torch.Tensor:
    x = drawn(tokens, size, seed=seed) @ (drawn(size, size) * torch.logspace(0, -2, size))
    return x.T @ x


@pytest.mark.parametrize(("width", "heads"), [(768, 12), (4096, 32), (8192, 64)])
def test_thresholds_are_those_of_the_theorems(width: int, heads: int) -> None:
    tokens = 16384
    assert parameter_threshold(width, width, 1) == pytest.approx(width / 2)
    assert parameter_threshold(width, width, heads) == pytest.approx(width / (heads + 1))
    assert memory_threshold(width, 1, tokens) == pytest.approx(tokens * width / (tokens + width))
    per_head = tokens * width / (heads * tokens + width)
    assert memory_threshold(width, heads, tokens) == pytest.approx(per_head)


@repeatable
@given(grouped, st.integers(1, 4096))
def test_thresholds_are_where_counts_cross(spec: LowRankSpec, tokens: int) -> None:
    out = spec.side == "out"
    width, other = spec.out_features, spec.in_features
    width, other = (width, other) if out else (other, width)
    saves = spec.rank < parameter_threshold(width, other, spec.groups) - 1e-9
    assert saves == (spec.parameters < spec.dense_parameters)
    kept = spec.groups * spec.rank * tokens + spec.rank * width  # in rank space, and a streamed factor
    less = kept < tokens * width
    assert less == (spec.rank < memory_threshold(width, spec.groups, tokens) - 1e-12)


def test_a_given_rank_takes_the_most_groups_that_save() -> None:
    assert groups_for_rank(768, 768, 12, 32)[0] == 12  # under 768/13
    assert groups_for_rank(768, 768, 12, 100)[0] == 6
    assert groups_for_rank(768, 768, 12, 300)[0] == 1  # under 768/2
    assert "saves nothing" in groups_for_rank(768, 768, 12, 500)[1]
    assert groups_for_rank(1024, 4096, 8, 100)[0] == 8  # H_kv of grouped-query attention


def test_a_budget_takes_the_grouping_of_least_predicted_error() -> None:
    assert groups_for_budget(4096, 4096, 32, 2.0)[0] == 1
    assert groups_for_budget(4096, 4096, 32, 1e6)[0] == 1
    assert "groupings" in groups_for_budget(4096, 4096, 32, 2.0)[1]


def test_groups_keep_heads_whole() -> None:
    assert nearest_grouping(5, 12, 768) == 6
    assert nearest_grouping(99, 12, 768) == 12


@repeatable
@given(grouped)
def test_description_survives_json_and_old_ones_are_read(spec: LowRankSpec) -> None:
    fields = json.loads(json.dumps(spec.to_dict()))
    assert spec_from_dict(fields) == spec
    assert ("groups" in fields) == (spec.groups > 1)
    assert (
        spec_from_dict({"structure": "svd", "in_features": 3, "out_features": 2, "rank": 1}).groups == 1
    )


@pytest.mark.parametrize("wrong", [(6, 4, 1, 3, "out"), (6, 4, 1, 4, "in"), (6, 4, 1, 2, "up")])
def test_impossible_groups_are_refused(wrong: tuple[int, int, int, int, str]) -> None:
    with pytest.raises(ValueError, match=r"divide|side is"):
        LowRankSpec(*wrong)


@repeatable
@given(grouped, st.booleans())
def test_layer_computes_what_reconstruction_says(spec: LowRankSpec, bias: bool) -> None:
    layer = StructuredLinear(spec, bias).double()
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = drawn(3, 2, spec.in_features)
    dense = lowrank.reconstruct({"U": layer.U.data, "V": layer.V.data}, spec)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, dense, layer.bias))


@repeatable
@given(grouped, st.sampled_from([2, 40]), st.booleans())
def test_weighted_groups_are_never_worse(spec: LowRankSpec, tokens: int, weigh: bool) -> None:
    weight, gram = drawn(spec.out_features, spec.in_features), gram_of(spec.in_features, tokens)
    plain = lowrank.fit(weight, spec)
    weighted = lowrank.fit(weight, spec, gram)
    assert {n: tuple(t.shape) for n, t in weighted.items()} == spec.shapes()
    errors = [relative_error(weight, lowrank.reconstruct(fit, spec), gram) for fit in (plain, weighted)]
    assert errors[1] <= errors[0] * (1 + 1e-9) + 1e-5


@pytest.mark.parametrize("side", ["out", "in"])
def test_one_group_is_the_plain_factorization(side: str) -> None:
    weight, gram = drawn(8, 12), gram_of(12, 40)
    for norm in (None, gram):
        one = lowrank.fit(weight, LowRankSpec(12, 8, 3, 1, side), norm)
        plain = lowrank.fit(weight, LowRankSpec(12, 8, 3), norm)
        assert all(torch.equal(one[name], plain[name]) for name in plain)


def test_groups_of_rows_are_optimal_each() -> None:
    weight, spec = drawn(12, 10), LowRankSpec(10, 12, 2, 3, "out")
    found = lowrank.reconstruct(lowrank.fit(weight, spec), spec)
    for part, whole in zip(found.split(4), weight.split(4), strict=True):
        missed = torch.linalg.svdvals(whole)[2:].norm()
        assert (part - whole).norm() == pytest.approx(float(missed), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("heads", ["per-head", "grouped:2", "auto"])
def test_plans_follow_the_heads_of_the_config(name: str, heads: str, tmp_path: Path) -> None:
    source = open_source(save_pico(name, tmp_path))
    plan = make_plan(source, make_recipe(method="svd", heads=heads, cf=1.3))
    found = {p.layer.type: p.spec for p in plan.layers}
    groups = {kind: spec.groups for kind, spec in found.items() if isinstance(spec, LowRankSpec)}
    expected = {
        "llama": {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 4},
        "qwen3": {"q_proj": 4, "k_proj": 2, "v_proj": 2, "o_proj": 4},
        "gpt2": {"c_attn": 12, "c_proj": 4},
    }[name]
    assert all(groups[kind] == 1 for kind in groups.keys() - expected.keys())
    if heads == "per-head":
        assert {kind: groups[kind] for kind in expected} == expected
    if heads == "grouped:2":
        assert all(groups[kind] == 2 for kind in expected)
    if heads == "auto":
        assert all(
            "group" in p.rule or "whole" in p.rule for p in plan.layers if p.layer.type in expected
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_same_logits_as_dense_rebuilt_from_grouped_factors(name: str, tmp_path: Path) -> None:
    source, output = save_pico(name, tmp_path / "dense"), tmp_path / "out"
    recipe = make_recipe(method="svd", heads="per-head", cf=1.3)
    compress(source, recipe, output, Settings("pico", check=False), Progress(quiet=True))
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    modules, structured = dict(dense.named_modules()), 0
    for module, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            weight = lowrank.reconstruct({"U": layer.U.data, "V": layer.V.data}, layer.spec)
            target = modules[module].weight
            target.data = (
                weight.T.contiguous() if target.shape != weight.shape or name == "gpt2" else weight
            )
            structured += layer.spec.groups > 1
    assert structured
    with torch.inference_mode():
        found, expected = model(**inputs_for(model))[0], dense(**inputs_for(model))[0]
    assert (found - expected).norm() < 1e-4 * expected.norm()
