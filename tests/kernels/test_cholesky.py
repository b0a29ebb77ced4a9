"""Batches of positive definite systems by tiles, against float64 and against the plain reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import compile_for
from plain_kernels import cholesky_factor, cholesky_solve

from blr.compressor.structures import linalg
from blr.kernels.training import cholesky as launch

CASES = [(1, 1, 1), (5, 3, 2), (64, 7, 2), (65, 33, 2), (130, 40, 3)]


def systems(n: int, m: int, g: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [g, n, n] whose rows fall off in size, and right sides [g, m, n]."""
    torch.manual_seed(n)
    x = torch.randn(g, n, 2 * n)
    fall = torch.arange(1, n + 1) ** -0.5
    made = fall[:, None] * (x @ x.mT / n) * fall
    return (made + made.mT) / 2, torch.randn(g, m, n)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("n", "m", "g"), CASES)
def test_factors_and_solutions_are_those_of_float64(n: int, m: int, g: int) -> None:
    matrices, right = systems(n, m, g)
    found = launch.factored(matrices)
    factor = cholesky_factor(matrices.double())
    torch.testing.assert_close(factor @ factor.mT, matrices.double())
    assert not found.unsound()
    assert distance(found.lower.tril(), factor) < 1e-5
    expected = torch.linalg.solve(matrices.double(), right.double(), left=False)
    assert distance(cholesky_solve(factor, right.double()), expected) < 1e-9
    assert distance(found.solve(right), expected) < 1e-4


def test_a_matrix_that_is_not_positive_definite_is_told_from_the_others() -> None:
    matrices, _ = systems(70, 1, 2)
    matrices[1, 66, 66] = -1
    assert launch.factored(matrices).unsound()
    assert not launch.factored(matrices[:1]).unsound()


def test_a_system_does_not_depend_on_those_beside_it() -> None:
    """Processes share out block rows, and give the bytes of one."""
    matrices, right = systems(70, 5, 3)
    together = launch.factored(matrices).solve(right)
    alone = [launch.factored(matrices[n : n + 1]).solve(right[n : n + 1]) for n in range(3)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("definite", [True, False])
def test_the_shared_solvers_take_them(definite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where a matrix needs more jitter, what everybody takes."""
    matrices, right = systems(40, 6, 2)
    if not definite:
        matrices[0] -= 1.00001 * torch.linalg.eigvalsh(matrices[0].double())[0] * torch.eye(40)
        matrices[0, :, 7] = matrices[0, 7] = 0
        matrices[0, 7, 7] = -1e-5
    expected = linalg.solve_spd(matrices, right), linalg.inverse_spd(matrices)
    monkeypatch.setenv("BLR_KERNELS", "triton")
    with linalg.recorded_fallbacks() as notes:
        found = linalg.solve_spd(matrices, right), linalg.inverse_spd(matrices)
    assert bool(notes) is not definite
    for ours, wanted in zip(found, expected, strict=True):
        assert distance(ours, wanted.double()) < 1e-3


TILE = {"TILE": launch.TILE}
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "diagonal_kernel": ({"inverses": "*fp32", "inverse_batch": "i64"}, TILE),
    "panel_kernel": ({"inverses": "*fp32", "inverse_batch": "i64"}, {**TILE, "PRECISION": "tf32x3"}),
    "update_kernel": ({}, {**TILE, "PRECISION": "tf32x3"}),
}


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_factorizations_compile_without_spills(kernel: str, capability: int) -> None:
    more, constants = KERNELS[kernel]
    signature = {"a": "*fp32", "n": "i32", "first": "i32", "a_batch": "i64", **more}
    found = compile_for(
        "blr.kernels.training.cholesky_triton",
        kernel,
        signature,
        constants,
        capability,
        num_warps=launch.WARPS,
    )
    assert found["spills"] == 0


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize("back", [False, True])
def test_solutions_compile(back: bool, capability: int) -> None:
    """With eight warps nothing spills, and they take a third longer."""
    signature = dict.fromkeys(("y", "lower", "inverses"), "*fp32") | dict.fromkeys("mn", "i32")
    strides = ("y_batch", "lower_batch", "inverse_batch", "inverse_tile")
    constants = {"BACK": back, "ROWS": launch.ROWS, **TILE, "PRECISION": "tf32x3"}
    found = compile_for(
        "blr.kernels.training.cholesky_triton",
        *("solve_kernel", {**signature, **dict.fromkeys(strides, "i64")}, constants, capability),
        num_warps=launch.WARPS,
    )
    assert found["spills"] <= 96
