"""Rounding behind error compensation, and corrections of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blr.compressor.fitting.rounding import Metric, plain_fit, quantize_factors, round_layer
from blr.compressor.structures import blast
from blr.compressor.structures.gptq import compensation, gptq
from blr.compressor.structures.latent import RoundedGrid
from blr.compressor.structures.linalg import solve_spd
from blr.compressor.structures.packing import pack_factor, restored, unpack_factor
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    QuantizedSpec,
)
from blr.kernels.decode.quantized.reference import values_of

DENSE = QuantizedSpec(DenseSpec(96, 64), 2, 32)


def _problem() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(400, 96, dtype=torch.float64) @ torch.randn(96, 96, dtype=torch.float64) / 8
    return torch.randn(64, 96, dtype=torch.float64), x.mT @ x / 400


def _error(missed: torch.Tensor, gram: torch.Tensor) -> float:
    return float(((missed @ gram) * missed).sum())


def _lost(weight: torch.Tensor, spec: QuantizedSpec | CorrectedSpec, metric: Metric | None) -> float:
    gram = _problem()[1]
    stored = round_layer(weight, spec, metric, torch.float64, plain_fit(gram=metric and metric.gram))
    return _error(weight - restored(spec, stored, weight.dtype), gram)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compensated_rounding_loses_less_of_the_output(bits: int) -> None:
    weight, gram = _problem()
    spec = replace(DENSE, bits=bits)
    assert _lost(weight, spec, Metric(gram)) < 0.8 * _lost(weight, spec, None)


def test_the_latent_weights_round_to_the_levels() -> None:
    weight, gram = _problem()
    levels, scale, latent = gptq(weight, compensation(gram), RoundedGrid(3, 32, torch.float64))
    assert latent.shape == weight.shape
    inner = levels.unflatten(1, (-1, 32))
    value = values_of(inner, scale[..., None], 3)
    missed = (latent.unflatten(1, (-1, 32)) - value).abs() / scale[..., None]
    inner = inner.abs() < 3
    assert float(missed[inner].max()) < 1  # half a step, where steps are widest


def test_matrices_are_rounded_together_as_one_by_one() -> None:
    weight, gram = _problem()
    weights, grams = torch.stack([weight, weight.flip(1)]), torch.stack([gram, gram.flip(0, 1) * 3])
    grid = RoundedGrid(4, 40, torch.float32)
    together = gptq(weights, compensation(grams), grid)
    for n in range(2):
        alone = gptq(weights[n], compensation(grams[n]), grid)
        assert torch.equal(together[0][n], alone[0]) and torch.equal(together[1][n], alone[1])
        torch.testing.assert_close(together[2][n], alone[2])


@pytest.mark.parametrize("known", [False, True], ids=["plain", "calibrated"])
def test_terms_make_good_what_others_lose(known: bool) -> None:
    """Pairs of terms of opposite sign, nearly alike: U behind compensation keeps their product far
    better than the same U by nearest levels."""
    gram = _problem()[1] if known else torch.eye(96, dtype=torch.float64)
    spec = QuantizedSpec(BlastSpec(96, 64, 4, 32), 4, 32)
    factors = {name: torch.randn(shape).double() for name, shape in spec.shapes().items()}
    for name, sign in (("U", -1.0), ("V", 1.0), ("S", 1.0)):
        noise = 0.1 * torch.randn_like(factors[name][..., 16:])
        factors[name][..., 16:] = sign * factors[name][..., :16] + noise
    product = blast.reconstruct(factors, spec.of)
    found = quantize_factors(spec, factors, torch.float64, Metric(gram) if known else None)
    parts = {name: unpack_factor(spec, name, found.tensors, torch.float64) for name in "USV"}
    right = blast.right_factor(parts, spec.of)
    exact = solve_spd(right.mT @ gram @ right, product.unflatten(0, (4, -1)) @ gram @ right)
    stored = pack_factor(spec, "U", exact, torch.float64)
    nearest = {**parts, "U": unpack_factor(spec, "U", stored, torch.float64)}
    lost = [_error(product - blast.reconstruct(tried, spec.of), gram) for tried in (parts, nearest)]
    assert lost[0] < 0.7 * lost[1]


def test_a_last_group_may_be_shorter_and_inputs_dead() -> None:
    weight, gram = _problem()
    gram[:, 5] = gram[5] = 0
    _, scale, latent = gptq(weight, compensation(gram), RoundedGrid(3, 40, torch.float32))
    assert scale.shape == (64, 3) and bool(scale.isfinite().all() and latent.isfinite().all())


@pytest.mark.parametrize("correction", [LowRankSpec(96, 64, 4), BlastSpec(96, 64, 2, 4)], ids=repr)
def test_a_correction_beats_rounding_alone(correction: LowRankSpec | BlastSpec) -> None:
    weight, gram = _problem()
    packed = QuantizedSpec(correction, 4, 32, tiled=True)
    spec = CorrectedSpec(DENSE, packed)
    assert _lost(weight, spec, Metric(gram)) < 0.85 * _lost(weight, DENSE, Metric(gram))
