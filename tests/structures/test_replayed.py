"""An evaluation of BLAST's loss as one replay: what it computes, and what happens where a system has no
solution. Kernels run in Triton's interpreter, and calls stand for graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blr.compressor.structures import blast
from blr.compressor.structures.specs import BlastSpec

Compute = Callable[[Tensor], tuple[Tensor, ...]]


class Called:
    """Computes again where a graph would be replayed; `spoilt` calls give a loss of NaN."""

    def __init__(self, compute: Compute, given: Tensor) -> None:
        self.compute, self.spoilt, self.calls = compute, False, 0
        self.results = compute(given)

    def __call__(self, given: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        loss, *rest = self.compute(given)
        return (torch.full_like(loss, torch.nan) if self.spoilt else loss), *rest


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> tuple[blast.BlastProblem, Tensor]:
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(blast, "Captured", Called)
    torch.manual_seed(0)
    weight, x = torch.randn(12, 16), torch.randn(40, 16)
    made = blast.BlastProblem(weight, x.mT @ x / 40, BlastSpec(16, 12, 4, 5), noise=0.1)
    made.captures = True  # as on a GPU
    return made, made.start() + 0.1 * torch.randn(4 * 4 * 5 + 16 * 5)


def test_a_replay_is_the_evaluation(problem: tuple[blast.BlastProblem, Tensor]) -> None:
    made, theta = problem
    first, gradient = made.evaluate(theta)
    U = made.left()
    assert made.replayed is not None and not made.captures, "captured once, behind the first evaluation"
    found, along = made.evaluate(theta)
    assert made.replayed.calls == 1 and found == pytest.approx(first, rel=1e-6)
    torch.testing.assert_close(along, gradient)
    torch.testing.assert_close(made.left(), U)
    assert along is not made.evaluate(theta)[1], "the next replay writes over a graph's results"


def test_where_a_system_has_no_solution_everything_is_tried(
    problem: tuple[blast.BlastProblem, Tensor],
) -> None:
    made, theta = problem
    first, gradient = made.evaluate(theta)
    made.replayed.spoilt = True  # type: ignore[union-attr]
    found, along = made.evaluate(theta)
    assert found == pytest.approx(first, rel=1e-6)
    torch.testing.assert_close(along, gradient)


def test_what_cannot_be_captured_is_evaluated_as_before(
    problem: tuple[blast.BlastProblem, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, theta = problem

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(blast, "Captured", refuse)
    first, _ = made.evaluate(theta)
    assert made.replayed is None and made.evaluate(theta)[0] == first


def test_the_last_point_is_settled_without_noise(problem: tuple[blast.BlastProblem, Tensor]) -> None:
    """A graph keeps the noise that it was captured with."""
    made, theta = problem
    made.evaluate(theta)
    found = made.settle(theta, 0.0)
    exact = blast.BlastProblem(made.weight, made.gram, made.spec, noise=0.0)
    exact.evaluate(theta)
    torch.testing.assert_close(found, exact.left())
    assert made.replayed is None
