"""Fits in the norm of inputs and outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blr.compressor.fitting.factorize import OUTPUT_RIDGE, WeightedFit
from blr.compressor.fitting.moments import Moments
from blr.compressor.fitting.sensitivity import curve
from blr.compressor.structures.linalg import cholesky
from blr.compressor.structures.lowrank import reconstruct
from blr.compressor.structures.specs import LowRankSpec

PLAIN = SimpleNamespace(transposed=False)
CPU: Any = SimpleNamespace(device=torch.device("cpu"), layer=PLAIN)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_low_rank_is_optimal_in_the_metric_of_its_outputs(groups: int) -> None:
    """Groups of output rows in their own block of it: what is lost is what is left of the curve."""
    torch.manual_seed(groups)
    W, A, B = torch.randn(8, 12), torch.randn(12, 30), torch.randn(8, 9)
    weight, gram, output = (x.double() for x in (W, A @ A.mT, B @ B.mT))
    spec = LowRankSpec(12, 8, 1, groups)
    fit = WeightedFit(CPU, weight, Moments(gram), output).fit(weight, spec)
    missed = weight - reconstruct(fit, spec)
    for rows in torch.arange(8).view(groups, -1):
        own = output[rows][:, rows] + OUTPUT_RIDGE * torch.eye(len(rows))
        lost = (own @ missed[rows] @ gram @ missed[rows].mT).trace()
        expected = curve(weight[rows], cholesky(gram), own)[1:].sum()
        assert float(lost) == pytest.approx(float(expected), rel=1e-4)
    sizes = [fit[name].norm(dim=-2) for name in "UV"]
    torch.testing.assert_close(*sizes)  # int8 rounds the ranks of a token together


def test_groups_of_inputs_take_the_whole_metric() -> None:
    """Of full rank they are exact."""
    torch.manual_seed(0)
    A, B = torch.randn(12, 30).double(), torch.randn(8, 9).double()
    weight, spec = torch.randn(8, 12).double(), LowRankSpec(12, 8, 4, 3, side="in")
    fit = WeightedFit(CPU, weight, Moments(A @ A.mT), B @ B.mT).fit(weight, spec)
    torch.testing.assert_close(reconstruct(fit, spec), weight, rtol=1e-6, atol=1e-6)
