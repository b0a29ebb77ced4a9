"""Ranks from a budget: it is met, kernels like the ranks, sensitivities move them the right way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.compressor.planning.budget import Item, equal_margins, exact_ranks, snap

pytestmark = pytest.mark.fast

Sizes = list[tuple[int, int]]
LLAMA_7B = [(4096, 4096, 4), (11008, 4096, 2), (4096, 11008, 1)]
sizes = st.integers(4, 64).map(lambda n: 16 * n)
layers = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=8)


def llama(extra: int = 0, step: int = 1) -> list[Item]:
    return [Item(o * i, o + i + extra, step, count) for o, i, count in LLAMA_7B]


def spent(items: Sequence[Item], ranks: Sequence[float]) -> float:
    return sum(item.cost * item.count * rank for item, rank in zip(items, ranks, strict=True))


def dense(items: Sequence[Item]) -> int:
    return sum(item.size * item.count for item in items)


def fit_ranks(items: Sequence[Item], budget: float, **options: float) -> list[int]:
    """What a plan does for layers that share a budget."""
    return snap(items, exact_ranks(items, budget, **options), budget)


def falling(length: int, decay: float) -> list[float]:
    return [decay**n for n in range(length)]


@settings(max_examples=80)
@given(layers, st.sampled_from([1.25, 2.0, 4.0]), st.sampled_from([1, 4]))
def test_budget_is_met_within_a_percent_or_half_a_step(shapes: Sizes, cf: float, step: int) -> None:
    items = [Item(o * i, o + i, step) for o, i in shapes]
    budget = dense(items) / cf
    if budget < sum(item.least for item in items):
        return
    missed = abs(budget - spent(items, fit_ranks(items, budget)))
    assert missed <= max(0.01 * budget, min(item.least for item in items))


@settings(max_examples=40)
@given(layers, st.lists(st.floats(0.8, 0.999), min_size=8, max_size=8), st.floats(0.0, 1.0))
def test_sensitive_ranks_meet_the_budget_too(
    shapes: Sizes, decays: list[float], strength: float
) -> None:
    items = [
        Item(o * i, o + i, curve=falling(min(o, i), d))
        for (o, i), d in zip(shapes, decays, strict=False)
    ]
    budget = dense(items) / 2
    ranks = exact_ranks(items, budget, strength=strength, floor=0.3)
    assert spent(items, ranks) == pytest.approx(budget, rel=1e-6)
    found = fit_ranks(items, budget, strength=strength, floor=0.3)
    assert spent(items, found) == pytest.approx(budget, rel=0.01, abs=max(i.cost for i in items))
    assert all(1 <= rank <= item.full + 1 for item, rank in zip(items, found, strict=True))


def test_papers_ranks_follow_from_cf_2() -> None:
    items = llama()
    assert fit_ranks(items, dense(items) / 2) == [1024, 1488, 1488]


@pytest.mark.parametrize(("extra", "step"), [(0, 16), (256, 1)])
@pytest.mark.parametrize("cf", [1.25, 2.0, 3.0])
def test_large_ranks_are_multiples_that_kernels_like(extra: int, step: int, cf: float) -> None:
    items = llama(extra, step)
    ranks = fit_ranks(items, dense(items) / cf)
    assert all(rank % 8 == 0 for rank in ranks)
    assert spent(items, ranks) == pytest.approx(dense(items) / cf, rel=0.01)


def test_more_sensitive_layers_get_more() -> None:
    curves = [falling(256, 0.99), [value / 100 for value in falling(256, 0.99)]]
    items = [Item(256 * 256, 512, curve=curve) for curve in curves]
    first, second = fit_ranks(items, dense(items) / 2, strength=0.7, floor=0.3)
    assert first > 64 > second >= 0.3 * 0.3 * 64


def test_equal_margins_are_equal_and_keep_the_floor() -> None:
    curves = [falling(512, 0.99), [v / 3 for v in falling(512, 0.99)], [1e-9] * 512]
    items = [Item(512 * 512, 1024, curve=curve) for curve in curves]
    ranks = equal_margins(items, dense(items) / 2, 0.25)
    margins = [curve[round(rank)] for curve, rank in zip(curves[:2], ranks, strict=False)]
    assert margins[0] == pytest.approx(margins[1], rel=0.03)
    assert ranks[2] == 0.25 * 128


def test_without_curves_or_strength_ranks_are_uniform() -> None:
    items = [Item(64 * 64, 128, curve=falling(64, decay)) for decay in (0.5, 0.99)]
    assert exact_ranks(items, 2 * 64 * 32) == pytest.approx([16, 16])
    bare = [Item(64 * 64, 128) for _ in range(2)]
    assert exact_ranks(bare, 2 * 64 * 32, strength=1.0) == pytest.approx([16, 16])


def test_seventy_billion_parameters_take_seconds() -> None:
    curve = falling(4096, 0.999)
    items = [
        Item(o * i, o + i, curve=curve)
        for _ in range(80)
        for o, i in [(8192, 8192)] * 4 + [(28672, 8192)] * 3
    ]
    ranks = fit_ranks(items, dense(items) / 2, strength=0.7, floor=0.3)
    assert spent(items, ranks) == pytest.approx(dense(items) / 2, rel=0.001)
