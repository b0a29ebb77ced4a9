"""The published Kronecker-sparse grid, and a sample that stands for it."""

from __future__ import annotations

from collections import Counter

import pytest
from comparisons import BATCH, LIMIT, grid, largest, sample, stratum

pytestmark = pytest.mark.fast


def test_grid_of_the_paper() -> None:
    """Figure 7: its rules give 627 patterns (the percentages of table 6 are multiples of 1/627)."""
    found = grid()
    assert len(found) == len(set(found)) == 627
    assert sum(a == 1 for a, _, _, _ in found) == 299
    assert len(grid(1, limit=10**15)) == 932
    assert (1, 1024, 1024, 64) in found
    assert (2, 1024, 256, 4) not in found and (1, 1024, 256, 4) in found
    assert {d for a, _, _, d in found if a > 1} == {4, 16, 64}


def test_batches_only_take_patterns_away() -> None:
    assert grid(1) == grid()
    double = grid(2 * BATCH)
    assert set(double) < set(grid())
    assert max(largest(p, 2 * BATCH) for p in double) <= LIMIT


@pytest.mark.parametrize("size", [1, 60, 200])
def test_sample_has_its_share_of_every_stratum(size: int) -> None:
    everything = grid()
    taken = sample(everything, size)
    assert len(taken) == size
    assert taken == sample(everything, size) and set(taken) <= set(everything)
    assert len(set(taken)) == size
    if size > 1:  # a run that stops early has seen every kind
        kinds = {stratum(p)[:2] for p in everything}
        assert {stratum(p)[:2] for p in taken[: size // 3]} == kinds
    shares, found = Counter(map(stratum, everything)), Counter(map(stratum, taken))
    assert all(abs(found[key] - count * size / len(everything)) < 1 for key, count in shares.items())


def test_sample_of_more_than_there_are_is_all() -> None:
    assert sample(grid(), 10_000) == grid()
    assert sample([], 5) == []
