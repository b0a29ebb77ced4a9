"""Interleaving, medians and rotating copies."""

from __future__ import annotations

import pytest
import torch

from blr.bench.timing import (
    MAX_COPIES,
    MIN_ROUNDS,
    CpuSampler,
    Rotation,
    copies_for,
    interleave,
    spread,
)

pytestmark = pytest.mark.fast


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorded:
    """A sampler that takes `seconds`, writes its name down and fails in round `breaks`."""

    def __init__(
        self, name: str, log: list[str], clock: Clock, seconds: float, breaks: int = -1
    ) -> None:
        self.name, self.log, self.clock, self.seconds, self.breaks = name, log, clock, seconds, breaks

    def sample(self) -> float:
        self.log.append(self.name)
        self.clock.now += self.seconds
        if self.log.count(self.name) - 1 == self.breaks:
            raise RuntimeError(self.name)
        return self.seconds * 1e3


def run(
    seconds: dict[str, float], rounds: int, breaks: dict[str, int] | None = None
) -> tuple[list[str], dict[str, list[float]], list[str]]:
    log: list[str] = []
    failed: list[str] = []
    clock = Clock()
    made = {n: Recorded(n, log, clock, s, (breaks or {}).get(n, -1)) for n, s in seconds.items()}
    arms = {name: recorded.sample for name, recorded in made.items()}
    times = interleave(arms, rounds, lambda name, error: failed.append(name), 0.3, clock)
    return log, times, failed


def test_arms_take_turns() -> None:
    log, times, _ = run({"a": 0.001, "b": 0.002}, 4)
    assert log == ["a", "b"] * 4
    assert times == {"a": [1.0] * 4, "b": [2.0] * 4}


def test_a_slow_arm_gets_few_rounds() -> None:
    _, times, _ = run({"slow": 1.0, "quick": 0.001}, 10)
    assert {name: len(found) for name, found in times.items()} == {"slow": MIN_ROUNDS, "quick": 10}


def test_an_arm_that_fails_is_given_up_alone() -> None:
    log, times, failed = run({"a": 0.001, "b": 0.001}, 4, {"a": 1})
    assert failed == ["a"]
    assert log == ["a", "b", "a", "b", "b", "b"]
    assert list(times) == ["b"]


def test_spread_is_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.ms, found.high, found.rounds) == (2.0, 3.0, 4.0, 5)
    assert spread([7.0]).ms == spread([7.0]).low == 7.0


@pytest.mark.parametrize(
    ("size", "l2", "copies"), [(10, 100, 40), (1000, 100, 1), (1, 10**9, MAX_COPIES), (0, 0, 1)]
)
def test_copies_exceed_four_times_the_cache(size: int, l2: int, copies: int) -> None:
    assert copies_for(size, l2) == copies


def test_rotation_copies_values_and_strides_but_not_memory() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4).mT
    copies = Rotation((x, w), l2=128).all()
    assert len(copies) == 4  # 128 bytes each
    assert copies[0][0] is x
    assert all(torch.equal(found, w) and found.stride() == w.stride() for _, found in copies)
    assert len({found.data_ptr() for _, found in copies}) == 4


def test_cpu_sampler_calls_every_copy() -> None:
    seen: set[int] = set()
    rotation = Rotation((torch.ones(8),), l2=16)

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.data_ptr())
        return x + 1

    sampler = CpuSampler(call, rotation)
    assert sampler.sample() > 0
    assert len(seen) == sampler.calls == 2
