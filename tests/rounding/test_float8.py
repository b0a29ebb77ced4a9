"""Rounding to float8 behind error compensation, and the moments of what each factor multiplies."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES

from blr.compressor.fitting.rounding import Metric, plain_fit, quantize_factors, round_layer
from blr.compressor.fitting.twins import make_twin
from blr.compressor.rounding.gptq import compensation, gptq_fp8
from blr.compressor.rounding.seen import seen_by
from blr.compressor.structures.base import FitOptions, weighted_norm_squared
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.restore import restored
from blr.compressor.structures.specs import (
    BlastSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.fp8.reference import (
    dequantize_fp8,
    layer,
    quantize_fp8,
    quantize_rows,
    scales_of,
)

pytestmark = pytest.mark.fast
PLAIN = [LowRankSpec(96, 64, 24), MonarchSpec(96, 64, 4, 5), BlastSpec(96, 64, 4, 24)]


def _inputs() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(400, 96, dtype=torch.float64) @ torch.randn(96, 96, dtype=torch.float64) / 8


@pytest.mark.parametrize("group", [0, 32])
def test_where_errors_cost_the_same_numbers_are_the_nearest(group: int) -> None:
    weight = torch.randn(3, 20, 72)
    root = compensation(torch.eye(72, dtype=torch.float64).expand(3, 72, 72)).float()
    found, scale = gptq_fp8(weight, root, group, torch.bfloat16)
    expected, by = quantize_fp8(weight, group, torch.bfloat16)
    assert scale.equal(by) and found.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize("group", [0, 32])
def test_compensated_rounding_loses_less_of_the_output(group: int) -> None:
    x, weight = _inputs(), torch.randn(64, 96, dtype=torch.float64)
    weight[5], gram = 0, x.mT @ x / 400
    gram[:, 7] = gram[7] = 0
    found = gptq_fp8(weight, compensation(gram), group, torch.float32)
    missed = [
        weight - dequantize_fp8(q, scale, torch.float64, group)
        for q, scale in (found, quantize_fp8(weight, group, torch.float32))
    ]
    lost, nearest = (weighted_norm_squared(m, gram) for m in missed)
    assert lost < 0.6 * nearest
    assert not bool(missed[0][5].any())


@pytest.mark.parametrize("spec", PLAIN, ids=lambda s: s.structure)
def test_u_is_rounded_for_what_v_makes_of_the_inputs(spec: Spec) -> None:
    """The outputs' moments by those of z are those of the outputs themselves."""
    x = _inputs()
    factors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in spec.shapes().items()}
    found = seen_by("U", spec, factors, x.mT @ x)
    assert found is not None
    y = STRUCTURES[spec.structure].reference()(x, *factors.values())
    blocks = getattr(spec, "blocks", 1)
    per_block = (y.mT @ y).unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))
    expected = torch.stack([per_block[k, :, k] for k in range(blocks)])
    mine = factors["U"] @ found @ factors["U"].mT
    assert (mine - expected).norm() < TOLERANCES[torch.float64] * expected.norm()


@pytest.mark.parametrize("of", PLAIN, ids=lambda s: s.structure)
def test_statistics_of_the_inputs_take_errors_off_layers(of: Spec) -> None:
    x, weight = _inputs(), torch.randn(64, 96, dtype=torch.float64)
    gram, spec = x.mT @ x / 400, QuantizedSpec(of, 8, 0, fp8=True)
    fitted = plain_fit(gram=gram)(weight, of)
    exact = restored(of, fitted, torch.float64)
    lost = []
    for metric in (None, Metric(gram)):
        stored = round_layer(weight, spec, metric, torch.float64, lambda w, s: fitted)
        lost.append(weighted_norm_squared(exact - restored(spec, stored, torch.float64), gram))
    assert lost[1] < 0.9 * lost[0]


@pytest.mark.parametrize("of", PLAIN, ids=lambda s: s.structure)
def test_what_is_trained_is_rounded_for_its_inputs_too(of: Spec) -> None:
    x, spec = _inputs(), QuantizedSpec(of, 8, 0, fp8=True)
    gram = x.mT @ x / 400
    fit = plain_fit(FitOptions(rounds=5), gram)
    weight = torch.randn(64, 96, dtype=torch.float64)
    twin = make_twin(spec, round_layer(weight, spec, Metric(gram), torch.bfloat16, fit))
    for part in twin.parts.values():
        part.parameter.mul_(1 + 0.05 * torch.randn_like(part.parameter))
    trained = {name: part.parameter.double() for name, part in twin.parts.items()}
    exact = restored(of, trained, torch.float64)
    lost = [
        weighted_norm_squared(
            exact - restored(spec, twin.stored(torch.bfloat16, m), torch.float64), gram
        )
        for m in (None, Metric(gram))
    ]
    assert lost[1] < 0.9 * lost[0]


def _falling(size: int, powers: float) -> torch.Tensor:
    return torch.logspace(0, -powers, size, dtype=torch.float64)


@pytest.mark.parametrize(("of", "share"), [(PLAIN[0], 0.85), (PLAIN[1], 0.95)], ids=["svd", "monarch"])
def test_layers_fitted_for_float8_lose_less(of: Spec, share: float) -> None:
    """Inputs and outputs of falling size; inputs, weights and z rounded, against the product in full."""
    torch.manual_seed(2)
    turns = [torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (96, 64)]
    x = torch.randn(400, 96, dtype=torch.float64) * _falling(96, 2) @ turns[0]
    weight = turns[1] * _falling(64, 2) @ torch.randn(64, 96, dtype=torch.float64)
    gram, spec, missed = x.mT @ x / 400, QuantizedSpec(of, 8, 0, fp8=True), []
    fit = plain_fit(FitOptions(rounds=5), gram)
    fitted = dict(fit(weight, of))
    exact = x @ restored(of, fitted, torch.float64).mT
    nearest = quantize_factors(spec, fitted, torch.float32).tensors
    for held in (nearest, round_layer(weight, spec, Metric(gram), torch.float32, fit)):
        found = (held[name] for name in ("U_q", "U_scale", "V_q", "V_scale"))
        u, by_u, v, by_v = (t if t.dim() == 3 else t[None] for t in found)
        made = [t for t in scales_of(by_u, v, by_v) if t is not None]
        kernel = STRUCTURES[of.structure].folder
        y = layer(kernel, quantize_rows(x.float()), (u, v), made, torch.float32)
        missed.append(float((y.double() - exact).norm() / exact.norm()))
    assert missed[1] < share * missed[0]
