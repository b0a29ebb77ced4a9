"""Ranks mixed for float8: the product stays, what rounding costs falls to what no mixture undercuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import RECOVERY

from blr.compressor.structures import lowrank
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.specs import LowRankSpec
from blr.compressor.structures.spread import spread

pytestmark = pytest.mark.fast


def _problem(o: int, i: int, fall: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs [512, i] whose sizes fall by so many powers of ten, along no axis."""
    torch.manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(i, i, dtype=torch.float64)).Q
    x = torch.randn(512, i, dtype=torch.float64) * torch.logspace(0, -fall, i, dtype=torch.float64)
    return torch.randn(o, i, dtype=torch.float64), x @ turned


def _cost(left: torch.Tensor, right: torch.Tensor, gram: torch.Tensor) -> float:
    """Σ_j ‖u_j‖² E z_j²."""
    z = (right * (gram @ right)).sum(0)
    return float((left.square().sum(0) * z).sum())


@settings(max_examples=40)
@given(
    o=st.integers(1, 12), i=st.integers(1, 12), rank=st.integers(1, 8), seen=st.integers(0, 12),
    true=st.integers(0, 8), white=st.booleans(),
)  # fmt: skip
def test_the_product_stays(o: int, i: int, rank: int, seen: int, true: int, white: bool) -> None:
    """Of dependent ranks, too, and of inputs that leave directions out."""
    torch.manual_seed(o * 1000 + i * 100 + rank)
    left, right = torch.randn(o, rank).double(), torch.randn(i, rank).double()
    left[:, true:] = 0
    x = torch.randn(20, i).double()
    x[:, seen:] = 0
    found = spread(left, right, None if white else x.mT @ x)
    expected = left @ right.mT
    missed = (found[0] @ found[1].mT - expected).norm()
    assert bool(missed.isfinite()) and float(missed) <= RECOVERY * max(1.0, float(expected.norm()))


@pytest.mark.parametrize("fall", [0.5, 2.0])
def test_rounding_costs_what_no_mixture_comes_below(fall: float) -> None:
    weight, x = _problem(96, 80, fall)
    gram = x.mT @ x / len(x)
    spec = LowRankSpec(80, 96, 32)
    plain, mixed = (
        lowrank.fit(weight, spec, gram, FitOptions(spread=chosen)).tensors for chosen in (False, True)
    )
    value, vectors = torch.linalg.eigh(gram)
    half = vectors * value.clamp_min(0).sqrt()
    sizes = torch.linalg.svdvals(mixed["U"] @ (mixed["V"].mT @ half))[:32]
    bound = float(sizes.sum() ** 2 / 32)
    assert bound * 0.999 < _cost(mixed["U"], mixed["V"], gram) < 1.1 * bound
    assert _cost(plain["U"], plain["V"], gram) == pytest.approx(float(sizes.square().sum()), rel=1e-6)
