"""The reference forward of Kronecker-sparse layers against its definition."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.layers.kronecker.reference import kronecker_factor, kronecker_linear

pytestmark = pytest.mark.fast

CHAINS = {
    "dense": [(1, 5, 7, 1)],
    "block-diagonal": [(3, 4, 2, 1)],
    "strided": [(1, 4, 2, 3)],
    "general": [(2, 3, 5, 4)],
    "two": [(1, 12, 6, 2), (2, 6, 8, 1)],
    "monarch": [(1, 4, 4, 4), (4, 4, 4, 1)],
    "butterfly": [(1, 2, 2, 8), (2, 2, 2, 4), (4, 2, 2, 2), (8, 2, 2, 1)],
}
BATCHES = [(), (1,), (0,), (7,), (2, 3), (2, 0, 3)]


def dense(w: Tensor) -> Tensor:
    """K [abd, acd] entry by entry from the definition."""
    a, b, c, d = w.shape
    matrix = w.new_zeros(a * b * d, a * c * d)
    for i, j, k, m in torch.cartesian_prod(*map(torch.arange, w.shape)).tolist():
        matrix[i * b * d + j * d + m, i * c * d + k * d + m] = w[i, j, k, m]
    return matrix


def random_chain(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(p, generator=generator, dtype=torch.float64) / p[2] ** 0.5 for p in CHAINS[name]]


def chain_matrix(factors: list[Tensor]) -> Tensor:
    return torch.linalg.multi_dot([*map(dense, factors)]) if len(factors) > 1 else dense(factors[0])


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_equals_dense(name: str, batch: tuple[int, ...]) -> None:
    factors = random_chain(name)
    matrix = chain_matrix(factors)
    x = torch.randn(*batch, matrix.shape[1], dtype=torch.float64)
    bias = torch.randn(matrix.shape[0], dtype=torch.float64)
    expected = x @ matrix.mT + bias
    got = kronecker_linear(x, factors, bias)
    assert got.shape == expected.shape
    assert (got - expected).norm() <= TOLERANCES[torch.float64] * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    factors = [w.to(dtype) for w in random_chain(name)]
    matrix = chain_matrix([w.double() for w in factors])
    x = torch.randn(9, matrix.shape[1], dtype=torch.float64).to(dtype)
    expected = x.double() @ matrix.mT
    got = kronecker_linear(x, factors)
    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= TOLERANCES[dtype] * expected.norm()


def test_non_contiguous_input() -> None:
    factors = random_chain("two")
    x = torch.randn(16, 5, 3, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(kronecker_linear(x, factors), kronecker_linear(x.clone(), factors))


def test_reads_nothing_outside_its_input() -> None:
    w = random_chain("general")[0]
    padded = torch.full((4, 2 * 5 * 4 + 3), float("nan"), dtype=torch.float64)
    padded[:, :-3] = 1.0
    assert kronecker_factor(padded[:, :-3], w).isfinite().all()


def test_gradients_reach_input_and_factors() -> None:
    factors = [w.requires_grad_() for w in random_chain("two")]
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *f: kronecker_linear(x, f), (x, *factors))
