"""The shared solvers: accurate, and never at an end where the library is."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blr.compressor.base.errors import NumericsError
from blr.compressor.structures import linalg

pytestmark = pytest.mark.fast

PACKAGE = Path(__file__).parents[2]
DECOMPOSITIONS = {
    *("cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "cond", "eig", "eigh"),
    *("eigvals", "eigvalsh", "geqrf", "inv", "inv_ex", "inverse", "ldl_factor", "ldl_solve", "lobpcg"),
    *("lstsq", "lu", "lu_factor", "lu_solve", "matrix_rank", "pca_lowrank", "pinv", "pinverse", "qr"),
    *("slogdet", "solve", "solve_ex", "solve_triangular", "svd", "svd_lowrank", "svdvals"),
    *("triangular_solve",),
}


def decompositions(path: Path) -> Iterator[str]:
    """Calls of decompositions by torch in a file, as file:line name."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in DECOMPOSITIONS:
            root = ast.unparse(node.value)
            if root in ("torch", "torch.linalg", "linalg"):
                yield f"{path}:{node.lineno} {root}.{node.attr}"


def test_no_decomposition_goes_around_this_module() -> None:
    rooms = ("compressor", "kernels", "scripts/bench")
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    found = {path: list(decompositions(path)) for path in files}
    (shared,) = [path for path in files if found[path] and path.name == "linalg.py"]
    assert len(found.pop(shared)) >= 5
    assert [call for calls in found.values() for call in calls] == []


class Failing:
    """A function of torch.linalg that fails as often as told."""

    def __init__(self, call: Callable[..., Any], times: int, message: str) -> None:
        self.call, self.times, self.message, self.calls = call, times, message, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise torch.linalg.LinAlgError(self.message)
        return self.call(*arguments)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right.mT


torch.manual_seed(0)
TALL = torch.randn(7, 4, dtype=torch.float64)
GRAM = TALL.T @ TALL
SOLVERS: dict[str, tuple[str, Callable[[], torch.Tensor], int]] = {
    "eigenvalues": ("eigvalsh", lambda: linalg.eigenvalues(GRAM), 5),
    "eigenvectors": ("eigh", lambda: linalg.top_eigenvectors(GRAM, 2).abs(), 5),
    "truncated_svd": ("eigh", lambda: product(*linalg.truncated_svd(TALL, 2)), 5),
    "orthonormal": ("qr", lambda: linalg.orthonormal(TALL).abs(), 2),
    "cholesky": ("cholesky_ex", lambda: linalg.cholesky(GRAM), 2),
    "rough_cholesky": ("cholesky_ex", lambda: linalg.rough_cholesky(GRAM), 2),
    "solve_spd": ("cholesky_ex", lambda: linalg.solve_spd(GRAM, TALL), 2),
    "inverse_spd": ("cholesky_ex", lambda: linalg.inverse_spd(GRAM), 2),
}
MESSAGES = ["the algorithm failed to converge", "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED"]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_failure_is_made_up_for_and_recorded(
    solver: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, solve, _ = SOLVERS[solver]
    expected = solve()
    failing = Failing(getattr(torch.linalg, name), 1, message)
    monkeypatch.setattr(torch.linalg, name, failing)
    with linalg.recorded_fallbacks() as notes:
        torch.testing.assert_close(solve(), expected)
    assert failing.calls == 2
    assert len(notes) == 1 and notes[0].endswith("repeated on the CPU")


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_always_fails_is_given_up_with_a_reason(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, solve, attempts = SOLVERS[solver]
    failing = Failing(getattr(torch.linalg, name), 10**9, MESSAGES[0])
    monkeypatch.setattr(torch.linalg, name, failing)
    with pytest.raises(NumericsError, match="--exclude the layer"):
        solve()
    assert failing.calls == attempts


@pytest.mark.parametrize("rows", [4, 9])
def test_orthonormal_columns_of_a_deficient_span(rows: int) -> None:
    basis = linalg.orthonormal(torch.ones(2, rows, 3, dtype=torch.float64))
    assert basis.shape == (2, rows, 3)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3).double().expand(2, 3, 3))


def test_eigenvalues_fall_and_are_not_negative() -> None:
    values = linalg.eigenvalues(torch.diag(torch.tensor([1.0, 3.0, -1e-12, 2.0])).double())
    assert values.tolist() == pytest.approx([3, 2, 1, 0]) and float(values[-1]) >= 0


def test_near_eigenvectors_are_worth_almost_as_much() -> None:
    """Of a stack: orthonormal, and what they capture is 98% of the most, also where eigenvalues hardly
    fall."""
    torch.manual_seed(0)
    rows = torch.randn(3, 256, 512, dtype=torch.float64)
    rows[1] *= torch.logspace(0, -2, 512)
    gram = rows @ rows.mT
    best, near = linalg.top_eigenvectors(gram, 8), linalg.near_eigenvectors(gram, 8)
    torch.testing.assert_close(near.mT @ near, torch.eye(8).double().expand(3, 8, 8))
    most, found = ((q.mT @ gram @ q).diagonal(dim1=1, dim2=2).sum(1) for q in (best, near))
    assert bool((found >= 0.98 * most).all()) and found[1] >= 0.998 * most[1]


@pytest.mark.parametrize("least", [0.5, -3e-9, -3e-6])
def test_a_gram_matrix_has_no_eigenvalue_below_zero(least: float) -> None:
    torch.manual_seed(0)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    gram = 3 * turn @ torch.diag(torch.tensor([least, 1.0, 1.0, 2.0]).double()) @ turn.mT
    found = linalg.definite(gram)
    expected = gram / gram.diagonal().mean()
    assert bool((torch.linalg.eigvalsh(found) > 0).all())
    torch.testing.assert_close(found, expected, rtol=0, atol=20 * max(-least, 1e-16))


@pytest.mark.parametrize("grams", [torch.zeros(2, 3, 3), torch.ones(3, 3)])
def test_rough_factors_have_finite_inverses(grams: torch.Tensor) -> None:
    root = linalg.rough_cholesky(grams.double())
    assert bool(torch.isfinite(linalg.solve_factored(root, torch.eye(3).double())).all())


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_that_is_not_said_to_be_a_failure_is_one(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a finite matrix: libraries of a GPU answer so for some that are singular."""
    name, solve, _ = SOLVERS[solver]
    real, calls, expected = getattr(torch.linalg, name), [], solve()

    def silent(matrix: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(matrix)
        found = real(matrix, *arguments, **options)
        if len(calls) == 1:
            for part in [found] if isinstance(found, torch.Tensor) else found:
                if part.is_floating_point():
                    part.fill_(torch.nan)
        return found

    monkeypatch.setattr(torch.linalg, name, silent)
    torch.testing.assert_close(solve(), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_named_as_such(bad: float) -> None:
    matrix = torch.eye(3).double()
    matrix[1, 1] = bad
    with pytest.raises(NumericsError, match=r"holds NaN or Inf|no Cholesky factor"):
        linalg.eigenvalues(matrix)
    with pytest.raises(NumericsError, match=r"holds NaN or Inf|no Cholesky factor"):
        linalg.cholesky(matrix)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_system_does_not_depend_on_one_that_takes_more_jitter(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes share systems out, and give the bytes of one."""
    monkeypatch.setenv("BLR_KERNELS", kernels)
    torch.manual_seed(0)
    root, right = torch.randn(3, 40, 50), torch.randn(3, 2, 40)
    matrices = root @ root.mT
    matrices[1] -= (torch.linalg.eigvalsh(matrices[1])[0] + 0.01) * torch.eye(40)
    together = linalg.solve_spd(matrices, right), linalg.inverse_spd(matrices)
    for n in range(3):
        with linalg.recorded_fallbacks() as notes:
            one = slice(n, n + 1)
            alone = linalg.solve_spd(matrices[one], right[one]), linalg.inverse_spd(matrices[one])
        assert bool(notes) is (n == 1)
        for all_of_them, it in zip(together, alone, strict=True):
            assert torch.equal(all_of_them[n], it[0])
