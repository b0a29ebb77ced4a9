"""Bits and ranks of layers that share one number of bits a weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.modeling import probes
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.recipe import architectures
from blr.compressor.recipe.schema import Recipe

pytestmark = pytest.mark.fast

TINY = open_source(Path(__file__).parents[1] / "data" / "tiny-llama")
BITS = 2.9


def plan(loud: str = "down_proj", **settings: object) -> Plan:
    """Of a model in which the layers named `loud` are 30 times as sensitive as the others."""
    recipe = Recipe.model_validate(
        {"method": "svd", "base": "int2", "group": 64, "bpw": BITS, **settings}
    )
    modules = [planned.layer.module for planned in make_plan(TINY, recipe).layers]
    return make_plan(TINY, recipe, {m: [30.0 if loud in m else 1.0] * 64 for m in modules})


def bases(found: Plan, name: str) -> set[int]:
    return {p.spec.base.bits for p in found.layers if name in p.layer.module}


def test_bits_go_where_errors_cost_most_and_are_as_many_as_asked() -> None:
    found = plan("3.mlp.down_proj")
    assert min(bases(found, "3.mlp.down_proj")) > min(bases(found, "0.mlp.down_proj"))
    assert BITS - 0.05 < found.bits <= BITS
    assert "sensitivity" in found.layers[0].rule


def test_layers_of_one_input_are_stored_alike_as_kernels_take_them_together() -> None:
    found = plan("v_proj")
    for n in range(4):
        attention = [p.spec for p in found.layers if f"{n}.self_attn" in p.layer.module]
        alike = {
            (s.base.bits, s.correction.of.rank) for s in attention if s.out_features != s.in_features
        }
        assert len(alike) == 1
    assert bases(found, "q_proj") == bases(found, "k_proj") == bases(found, "v_proj")
    assert architectures.SIBLINGS == probes.SIBLINGS


def test_uniform_allocation_gives_every_layer_the_same() -> None:
    assert bases(plan(allocation="uniform"), "") == {2}


def test_a_grid_of_one_number_of_bits_keeps_its_base() -> None:
    assert bases(plan(grid="q2_k", group=32, bpw=3.2), "") == {2}


def test_fewer_bits_than_the_smallest_correction_takes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"bpw 2\.3 cannot be met: int2 and the smallest"):
        plan(bpw=2.3)
