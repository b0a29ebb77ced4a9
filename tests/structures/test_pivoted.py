"""Pivot rows hold a low rank exactly, in bounded coefficients, whatever the matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import RECOVERY, SLACK, TOLERANCES

from blr.compressor.base.errors import NumericsError
from blr.compressor.structures import lowrank, pivoted
from blr.compressor.structures.balance import balanced
from blr.compressor.structures.base import relative_error
from blr.compressor.structures.linalg import orthonormal
from blr.compressor.structures.restore import restored
from blr.compressor.structures.specs import PivotedSpec, QuantizedSpec, spec_from_dict

pytestmark = pytest.mark.fast
seeds = st.integers(0, 2**16)


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(max_examples=30)
@given(seeds, st.integers(2, 40), st.integers(1, 40), st.integers(0, 12), st.data())
def test_the_function_is_that_of_both_factors(seed: int, o: int, i: int, decay: int, data) -> None:  # type: ignore[no-untyped-def]
    """Down to singular values of 1e-12 of the largest, in float64."""
    rank = data.draw(st.integers(1, min(o - 1, i)))
    left = draw(seed, o, rank) * torch.logspace(0, -decay, rank, dtype=torch.float64)
    right = draw(seed + 1, i, rank)
    found = pivoted.from_low_rank(left, right)
    spec = PivotedSpec(i, o, rank)
    assert {name: tuple(t.shape) for name, t in found.items()} == spec.shapes() | spec.indices()
    assert found["places"].sort().values.tolist() == list(range(o))
    assert float(found["U"].abs().max()) <= pivoted.BOUND * (1 + SLACK)
    assert relative_error(left @ right.mT, pivoted.reconstruct(found, spec)) < RECOVERY


def test_pivots_that_elimination_leaves_bad_are_exchanged() -> None:
    """Nearly Wilkinson's matrix: elimination keeps its rows, of which another one is large multiples."""
    n = 20
    below = torch.full((n + 1, n), -0.95, dtype=torch.float64)
    basis = orthonormal(below.tril(-1) + torch.eye(n + 1, n, dtype=torch.float64))
    start = pivoted.independent_rows(basis)
    others = [row for row in range(n + 1) if row not in start.tolist()]
    first = torch.linalg.solve(basis[start], basis[others], left=False)
    assert float(first.abs().max()) > 1e5
    pivots, coefficients = pivoted.strong_pivots(basis)
    assert float(coefficients.abs().max()) <= pivoted.BOUND * (1 + SLACK)
    rest = [row for row in range(n + 1) if row not in pivots.tolist()]
    torch.testing.assert_close(coefficients @ basis[pivots], basis[rest])


@settings(max_examples=20)
@given(seeds, st.floats(1.01, 4.0))
def test_any_bound_is_met(seed: int, bound: float) -> None:
    _, coefficients = pivoted.strong_pivots(orthonormal(draw(seed, 60, 20)), bound)
    assert float(coefficients.abs().max()) <= bound * (1 + SLACK)


@pytest.mark.parametrize("kind", ["zeros", "rank one", "equal rows"])
def test_matrices_of_a_smaller_rank(kind: str) -> None:
    weight = {
        "zeros": torch.zeros(12, 9, dtype=torch.float64),
        "rank one": draw(0, 12, 1) @ draw(1, 1, 9),
        "equal rows": draw(0, 1, 9).expand(12, 9).clone(),
    }[kind]
    spec = PivotedSpec(9, 12, 4)
    for gram in (None, torch.zeros(9, 9, dtype=torch.float64), draw(2, 9, 3) @ draw(2, 9, 3).mT):
        low = lowrank.fit(weight, spec.low_rank(), gram).tensors
        found = pivoted.fit(weight, spec, gram).tensors
        assert float(found["U"].abs().max()) <= pivoted.BOUND * (1 + SLACK)
        back, expected = pivoted.reconstruct(found, spec), lowrank.reconstruct(low, spec.low_rank())
        assert float((back - expected).norm()) <= RECOVERY * max(float(weight.norm()), 1.0)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NumericsError, match="NaN or Inf"):
        pivoted.fit(torch.full((6, 5), torch.inf, dtype=torch.float64), PivotedSpec(5, 6, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_costs_what_it_costs_two_factors(dtype: torch.dtype) -> None:
    left, right = draw(0, 96, 30), draw(1, 64, 30)
    factors = {name: t.to(dtype) if name != "places" else t
               for name, t in pivoted.from_low_rank(left, right).items()}  # fmt: skip
    back = restored(PivotedSpec(64, 96, 30), factors, torch.float64)
    assert relative_error(left @ right.mT, back) < TOLERANCES[dtype]


def test_a_spec_says_what_is_stored() -> None:
    spec = PivotedSpec(10, 16, 4)
    assert spec.parameters == 4 * (10 + 16 - 4)
    assert spec.stored_bits(16) == 16 * spec.parameters + 32 * 16
    assert not spec.quantized and QuantizedSpec(spec, 4).quantized
    for known in (spec, QuantizedSpec(spec, 4)):
        assert spec_from_dict(known.to_dict()) == known
    for rank in (0, 16, 40):
        with pytest.raises(ValueError, match="fewer pivots than 16 rows"):
            PivotedSpec(10, 16, rank)


def test_balancing_leaves_them_alone() -> None:
    spec, found = PivotedSpec(9, 12, 4), pivoted.from_low_rank(100 * draw(0, 12, 4), draw(1, 9, 4))
    factors = {name: found[name] for name in spec.shapes()}
    assert all(balanced(factors, spec)[name].equal(found[name]) for name in factors)
