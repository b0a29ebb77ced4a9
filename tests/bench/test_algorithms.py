"""The published ways to apply one Kronecker-sparse factor agree with its definition."""

from __future__ import annotations

import pytest
import torch
from comparisons import Algorithms
from tolerances import TOLERANCES

from blr.kernels.layers.kronecker.reference import kronecker_factor

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta"),
]
PATTERNS = [(2, 48, 64, 3), (1, 16, 64, 4), (3, 64, 16, 1), (3, 6, 5, 2)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("name", ["bmm", "einsum", "dense"])
def test_algorithm(name: str, pattern: tuple[int, int, int, int]) -> None:
    a, _, c, d = pattern
    random = torch.Generator().manual_seed(3)
    w = torch.randn(pattern, generator=random, dtype=torch.float64)
    x = torch.randn(7, a * c * d, generator=random, dtype=torch.float64)
    algorithms = Algorithms(pattern)
    weight = getattr(algorithms, f"{name}_weight")(w)
    y = getattr(algorithms, name)(x, weight)
    assert y.is_contiguous()
    right = kronecker_factor(x, w)
    assert torch.dist(y, right) <= TOLERANCES[torch.float64] * right.norm()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_block_sparse_weight_is_the_block_diagonal(pattern: tuple[int, int, int, int]) -> None:
    w = torch.randn(pattern, generator=torch.Generator().manual_seed(4))
    algorithms = Algorithms(pattern)
    found = algorithms.bsr_weight(w)
    side = found.values().shape[-1]
    assert side == found.values().shape[-2] and side & (side - 1) == 0
    assert torch.equal(found.to_dense(), torch.block_diag(*algorithms.bmm_weight(w)))


def test_block_sparse_product() -> None:
    pattern = (2, 32, 48, 2)
    w = torch.randn(pattern, generator=torch.Generator().manual_seed(5))
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(6))
    right = kronecker_factor(x, w)
    algorithms = Algorithms(pattern)
    y = algorithms.bsr(x, algorithms.bsr_weight(w))
    assert torch.dist(y, right) <= TOLERANCES[torch.float32] * right.norm()
