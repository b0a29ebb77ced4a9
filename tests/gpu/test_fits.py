"""Fits on the GPU: systems by tiles, an evaluation of BLAST's loss as a CUDA graph, whole fits."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.structures import blast
from blr.compressor.structures.descent import descend
from blr.compressor.structures.linalg import definite
from blr.compressor.structures.specs import BlastSpec
from blr.kernels.training.cholesky import factored

pytestmark = pytest.mark.gpu
# o, i, blocks, rank: small, large enough to be taken in parts, of blocks that no kernel mixes
SHAPES = {
    "small": (192, 256, 16, 40),
    "wide": (1024, 3072, 16, 608),
    "six": (192, 288, 6, 50),
}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def problem(name: str, device: str, dtype: torch.dtype) -> tuple[blast.BlastProblem, torch.Tensor]:
    """With a point to evaluate, the same for every dtype."""
    o, i, blocks, rank = SHAPES[name]
    torch.manual_seed(0)
    weight, x = torch.randn(o, i), torch.randn(2 * i, i) * torch.arange(1, i + 1) ** -0.5
    gram = definite((x.mT @ x).double())
    made = blast.BlastProblem(
        weight.to(device, dtype), gram.to(device, dtype), BlastSpec(i, o, blocks, rank), None, 1e-3
    )
    theta = 1 + 0.1 * torch.randn(blocks * blocks * rank + i * rank)
    return made, theta.to(device, dtype)


@pytest.mark.parametrize(("n", "m", "g"), [(5, 3, 1), (64, 64, 16), (300, 96, 16), (1571, 100, 3)])
def test_systems_by_tiles_are_solved_as_in_float64(n: int, m: int, g: int, on_cuda: str) -> None:
    torch.manual_seed(n)
    x = torch.randn(g, n, 2 * n, device=on_cuda)
    fall = torch.arange(1, n + 1, device=on_cuda) ** -0.5
    matrices = fall[:, None] * (x @ x.mT / n) * fall
    matrices = (matrices + matrices.mT) / 2
    right = torch.randn(g, m, n, device=on_cuda) @ matrices
    found = factored(matrices)
    expected = torch.linalg.solve(matrices.double(), right.double(), left=False)
    assert not found.unsound() and distance(found.solve(right), expected) < 2e-4
    assert torch.equal(found.solve(right)[:1], factored(matrices[:1]).solve(right[:1]))
    matrices[-1, n // 2, n // 2] = -1
    assert factored(matrices).unsound()


@pytest.mark.parametrize("name", SHAPES)
def test_an_evaluation_is_that_of_float64_and_a_replay_the_same(name: str, on_cuda: str) -> None:
    made, theta = problem(name, on_cuda, torch.float32)
    exact, point = problem(name, on_cuda, torch.float64)
    loss, gradient = exact.evaluate(point)
    for _ in range(3):
        found, along = made.evaluate(theta)
        assert found == pytest.approx(loss, rel=1e-4)
        assert distance(along, gradient) < 1e-2
        assert distance(made.left(), exact.left()) < 2e-2
    assert made.replayed is not None


@pytest.mark.parametrize("name", SHAPES)
def test_a_fit_loses_no_more_than_without_kernels(
    name: str, on_cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = problem(name, on_cuda, torch.float32)

    def losses() -> list[float]:
        fitted = blast.BlastProblem(made.weight, made.gram, made.spec, None, 1e-5)
        return descend(fitted, fitted.start(), 60)[1]

    found = losses()
    monkeypatch.setenv("BLR_KERNELS", "torch")
    expected = losses()
    assert found[-1] < 1.01 * expected[-1] and found[-1] < found[0]
