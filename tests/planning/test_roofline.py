"""Predicted times: the design's table of floors, and what follows from launches and rooflines."""

from __future__ import annotations

import pytest

from blr.compressor.base.errors import UsageError
from blr.compressor.planning.roofline import (
    DECODE,
    PREFILL,
    find_gpu,
    gpus,
    layer_time,
)
from blr.compressor.structures.patterns import two_factor_chain
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)

pytestmark = pytest.mark.fast

H200 = find_gpu("h200")
# Design notes, "Floors at CF 2" (µs): (side, other side, n) to dense, low rank, Monarch b=16,
# BLAST b=4 and b=16, Kronecker-sparse pair.
FLOORS = {
    (4096, 4096, 1): (7.8, 3.9, 3.9, 3.9, 3.9, 3.9),
    (4096, 4096, 1024): (43.5, 21.8, 23.4, 25.3, 38.0, 21.8),
    (4096, 4096, 4096): (174, 87, 87, 101, 145, 87),
    (4096, 11008, 4096): (468, 233, 233, 256, 317, 234),
    (11008, 4096, 4096): (468, 233, 233, 256, 317, 234),
    (4096, 14336, 4096): (609, 303, 303, 327, 395, 304),
}


def at_cf_2(i: int, o: int) -> list[Spec]:
    """The structures of the table with ranks down to multiples of 16."""

    def rank(mix: int) -> int:
        return i * o // (2 * (i + o + mix)) // 16 * 16

    blast = [BlastSpec(i, o, b, rank(b * b)) for b in (4, 16)]
    chain = two_factor_chain(i, o, 4, 4, i * o // (2 * 4 * (i + o)))
    monarch = MonarchSpec(i, o, 16, rank(0) // 16)
    return [LowRankSpec(i, o, rank(0)), monarch, *blast, KroneckerSpec(i, o, chain)]


@pytest.mark.parametrize(("i", "o", "n"), FLOORS)
def test_table_of_floors(i: int, o: int, n: int) -> None:
    specs = at_cf_2(i, o)
    found = [layer_time(DenseSpec(i, o), n, H200, launch=False)]
    found += [layer_time(spec, n, H200, launch=False) for spec in specs]
    assert found == pytest.approx(FLOORS[i, o, n], rel=0.05)


def test_small_layers_do_not_gain_for_one_token() -> None:
    """k and v of Llama-3.1-8B: the second launch costs more than half of the bytes save."""
    halved = LowRankSpec(4096, 1024, 408)
    assert layer_time(halved, DECODE, H200) > layer_time(DenseSpec(4096, 1024), DECODE, H200)
    large = LowRankSpec(4096, 14336, 1568)
    assert layer_time(large, DECODE, H200) < layer_time(DenseSpec(4096, 14336), DECODE, H200)


@pytest.mark.parametrize("side", ["out", "in"])
def test_groups_cost_what_their_factors_cost(side: str) -> None:
    spec = LowRankSpec(512, 512, 16, 8, side)
    whole = LowRankSpec(512, 512, 16)
    assert layer_time(spec, PREFILL, H200) > layer_time(whole, PREFILL, H200)
    assert layer_time(LowRankSpec(512, 512, 16, 1, side), 1, H200) == layer_time(whole, 1, H200)


def test_every_gpu_is_known_and_slower_cards_are_slower() -> None:
    times = [layer_time(DenseSpec(4096, 4096), DECODE, gpu) for gpu in gpus().values()]
    assert times[0] == min(times)
    assert {gpu.source for gpu in gpus().values()} == {"measured", "datasheet"}
    assert find_gpu("RTX-4090").copy_tbps < 1.1
    with pytest.raises(UsageError, match="known: h200, h100"):
        find_gpu("abacus")
