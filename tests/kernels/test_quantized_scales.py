"""Searched scales: near the best there are, and errors where they cost little."""

from __future__ import annotations

import pytest
import torch

from blr.kernels.decode.quantized.reference import dequantize, quantize


@pytest.mark.parametrize(("bits", "least"), [(2, 0.343), (3, 0.186), (4, 0.100)])
def test_searched_scales_are_near_the_best_of_gaussian_weights(bits: int, least: float) -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 1024)
    assert float((dequantize(*quantize(w, bits), bits, 1024, w.dtype) - w).norm() / w.norm()) < least


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("K", [256, 200])
def test_importance_moves_errors_to_where_they_cost_little(bits: int, K: int) -> None:
    torch.manual_seed(0)
    w, costs = torch.randn(32, K), torch.logspace(-2, 2, K)[torch.randperm(K)]
    missed = []
    for importance in (None, costs, costs.expand(32, K)):
        packed, scale = quantize(w, bits, importance=importance)
        missed.append(float(((dequantize(packed, scale, bits, K, w.dtype) - w).square() * costs).sum()))
    assert missed[1] < 0.95 * missed[0] and missed[1] == pytest.approx(missed[2])
