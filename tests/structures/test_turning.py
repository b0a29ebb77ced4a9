"""Ranks mixed for float8: the product stays, rounding costs all of them alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import RECOVERY

from blr.compressor.structures import lowrank
from blr.compressor.structures.balance import turned
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, MonarchSpec, Spec

pytestmark = pytest.mark.fast


@settings(max_examples=40)
@given(
    blocks=st.integers(1, 4), o=st.integers(1, 5), i=st.integers(1, 5), rank=st.integers(1, 4),
    kind=st.sampled_from(["svd", "rows", "columns", "monarch"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_product_stays(blocks: int, o: int, i: int, rank: int, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    spec: Spec = MonarchSpec(blocks * i, blocks * o, blocks, rank)
    if kind != "monarch":
        groups = 1 if kind == "svd" else blocks
        spec = LowRankSpec(blocks * i, blocks * o, rank, groups, "in" if kind == "columns" else "out")
    factors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in spec.shapes().items()}
    reconstruct = STRUCTURES[spec.structure].factorizer().reconstruct
    expected = reconstruct(factors, spec)
    missed = (reconstruct(turned(spec, factors), spec) - expected).norm()
    assert float(missed) <= RECOVERY * max(1.0, float(expected.norm()))


def test_ranks_that_are_coupled_stay_as_they_are() -> None:
    spec = BlastSpec(8, 8, 2, 3)
    factors = {name: torch.randn(shape) for name, shape in spec.shapes().items()}
    assert all(t is factors[name] for name, t in turned(spec, factors).items())


@pytest.mark.parametrize("fall", [0.5, 2.0])
def test_rounding_costs_what_it_does_where_ranks_are_alike(fall: float) -> None:
    """Σ_j ‖u_j‖² E z_j² of inputs whose sizes fall by so many powers of ten, along no axis."""
    torch.manual_seed(0)
    sizes = torch.logspace(0, -fall, 80, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(80, 80, dtype=torch.float64)).Q
    x = torch.randn(512, 80, dtype=torch.float64) * sizes @ turn
    spec, gram = LowRankSpec(80, 96, 32), x.mT @ x / len(x)
    fitted = lowrank.fit(torch.randn(96, 80, dtype=torch.float64), spec, gram)
    left, inner = _sizes(fitted, gram)
    mixed, inside = _sizes(turned(spec, fitted), gram)
    alike = float(left.sum() * inner.sum()) / 32
    assert float(mixed @ inside) == pytest.approx(alike, rel=0.05)
    assert alike < 0.97 * float(left @ inner)


def _sizes(factors: dict[str, torch.Tensor], gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖u_j‖² and E z_j² of every rank."""
    return factors["U"].square().sum(0), (factors["V"] * (gram @ factors["V"])).sum(0)
