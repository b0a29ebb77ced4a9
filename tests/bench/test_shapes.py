"""Which ranks are timed: the published ones where they were published, budgets elsewhere."""

from __future__ import annotations

import pytest

from blr.bench.shapes import TUNED, find_layers, known_models, specs_for
from blr.compressor.base.errors import UsageError
from blr.compressor.structures.patterns import validate_chain
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec, LowRankSpec, MonarchSpec

pytestmark = pytest.mark.fast

QKVO, GATE, DOWN = find_layers(["llama-7b"])


def test_published_ranks_of_llama_7b() -> None:
    found = specs_for(GATE, TUNED)
    assert LowRankSpec(4096, 11008, 1488) in found
    assert MonarchSpec(4096, 11008, 16, 96) in found
    assert BlastSpec(4096, 11008, 16, 1488) in found
    assert [s.blocks for s in found if isinstance(s, BlastSpec)] == [4, 8, 16]


@pytest.mark.parametrize("model", known_models())
def test_every_spec_fits_its_layer_and_computed_ones_the_budget(model: str) -> None:
    for layer in find_layers([model]):
        for spec in specs_for(layer, TUNED):
            assert (spec.in_features, spec.out_features) == (layer.in_features, layer.out_features)
            if isinstance(spec, KroneckerSpec):
                validate_chain(spec.patterns, spec.in_features, spec.out_features)
            else:
                assert all(size > 0 for shape in spec.shapes().values() for size in shape)
        computed = specs_for(layer, ("svd", "monarch", "blast"), (2, 8), cf=2.5)
        for spec in computed:
            assert 2.5 <= spec.dense_parameters / spec.parameters < 2.5 * 1.2
            assert spec.rank % 16 == 0


def test_another_factor_or_block_count_is_computed() -> None:
    assert specs_for(QKVO, ["svd"], cf=4)[0].rank == 512
    assert specs_for(QKVO, ["svd"], cf=2)[0].rank == 1024
    (other,) = specs_for(QKVO, ["blast"], [4])
    assert (other.blocks, other.rank) == (4, 1008)


def test_blocks_that_do_not_divide_are_left_out() -> None:
    assert specs_for(QKVO, ["blast", "monarch"], [3, 5]) == []
    assert [s.blocks for s in specs_for(find_layers(["gpt2-s"])[0], ["blast"])] == [4, 6, 8, 16]


def test_a_factor_that_leaves_no_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves no rank for llama-7b down"):
        specs_for(DOWN, ["monarch"], [16], cf=1000)
