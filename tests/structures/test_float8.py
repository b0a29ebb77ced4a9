"""Rounding to float8 behind error compensation, and the moments of what each factor multiplies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.compressor.fitting.rounding import Metric, plain_fit, round_layer
from blr.compressor.fitting.student import make_twin
from blr.compressor.structures.base import FitOptions, weighted_norm_squared
from blr.compressor.structures.gptq import Costs, costs_of, round_fp8, seen_by_v
from blr.compressor.structures.packing import pack_factor, restored
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.common.names import FOLDERS
from blr.kernels.fp8.reference import (
    dequantize_fp8,
    layer,
    nearest_fp8,
    of_columns,
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
def test_where_errors_cost_the_same_numbers_are_the_nearest_at_better_scales(group: int) -> None:
    weight = torch.randn(3, 20, 72)
    costs = costs_of(torch.eye(72, dtype=torch.float64).expand(3, 72, 72))
    found, scale = round_fp8(weight, costs, group, torch.bfloat16)
    least, by = quantize_fp8(weight, group, torch.bfloat16)
    wide = of_columns(scale.float(), group, 72)
    assert found.view(torch.uint8).equal(nearest_fp8(weight, wide).view(torch.uint8))
    lost, before = (
        (weight - dequantize_fp8(q, s, torch.float32, group)).square().sum(-1)
        for q, s in ((found, scale), (least, by))
    )
    assert bool((lost <= before).all()) and float(lost.sum()) < 0.95 * float(before.sum())


@pytest.mark.parametrize("group", [0, 32])
def test_compensated_rounding_loses_less_of_the_output(group: int) -> None:
    x, weight = _inputs(), torch.randn(64, 96, dtype=torch.float64)
    weight[5], gram = 0, x.mT @ x / 400
    gram[:, 7] = gram[7] = 0
    found = round_fp8(weight, costs_of(gram), group, torch.float32)
    missed = [
        weight - dequantize_fp8(q, scale, torch.float64, group)
        for q, scale in (found, quantize_fp8(weight, group, torch.float32))
    ]
    lost, nearest = (weighted_norm_squared(m, gram) for m in missed)
    assert lost < 0.35 * nearest
    assert not bool(missed[0][5].any())


def test_of_few_tokens_the_diagonal_tells_more_about_others() -> None:
    torch.manual_seed(2)
    mixed = torch.eye(96, dtype=torch.float64) + torch.randn(96, 96, dtype=torch.float64) / 20
    weight = torch.randn(64, 96, dtype=torch.float64)
    x, gram = torch.randn(150, 96, dtype=torch.float64) @ mixed, mixed.mT @ mixed
    of_text = Metric(x.mT @ x / 150)

    def lost(costs: Costs) -> float:
        found = dequantize_fp8(*round_fp8(weight, costs, 0, torch.float32), torch.float64)
        return weighted_norm_squared(weight - found, gram)

    eased, as_seen = lost(of_text.float8), lost(costs_of(of_text.gram))
    assert lost(costs_of(gram)) < eased < 0.9 * as_seen


@settings(max_examples=20)
@given(seed=st.integers(0, 999), columns=st.integers(1, 150))
def test_the_order_in_which_columns_are_stored_changes_nothing(seed: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, columns, generator=generator, dtype=torch.float64)
    gram, order = x.mT @ x, torch.randperm(columns, generator=generator)
    found, scale = round_fp8(weight, costs_of(gram), 0, torch.float32)
    other, by = round_fp8(weight[:, order], costs_of(gram[order][:, order]), 0, torch.float32)
    assert scale.equal(by)
    assert found.view(torch.uint8)[:, order].equal(other.view(torch.uint8))


@pytest.mark.parametrize("spec", PLAIN[:2], ids=lambda s: s.structure)
def test_errors_in_v_cost_what_no_u_makes_good(spec: Spec) -> None:
    """Of one block of V, to first order: U solved again for the weight leaves as much."""
    torch.manual_seed(2)
    x = _inputs()
    gram = x.mT @ x / 400
    factors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in spec.shapes().items()}
    cost = seen_by_v(spec, factors, gram)
    assert cost is not None
    error = torch.zeros_like(factors["V"])
    U, block, metric = factors["U"], error, cost
    if isinstance(spec, MonarchSpec):
        s = spec.block_rank  # U of output block 2 for what block 1 of V makes
        U, block, metric = U[2][:, s : 2 * s], error[1][:, 2 * s : 3 * s], cost[1, 2]
    block.normal_().mul_(1e-4)
    expected = weighted_norm_squared(U @ block.mT, metric)
    solver = STRUCTURES[spec.structure].factorizer()
    weight = solver.reconstruct(factors, spec)
    Z = solver.right_factor(factors | {"V": factors["V"] + error}, spec)
    rows = weight.unflatten(0, (*Z.shape[:-2], -1))
    solved = torch.linalg.solve(Z.mT @ gram @ Z, (rows @ gram @ Z).mT).mT
    left = weighted_norm_squared((rows - solved @ Z.mT).reshape(weight.shape), gram)
    assert abs(left - expected) < 1e-2 * expected


def test_where_nothing_is_lost_any_rounding_is_taken() -> None:
    """V of all its inputs' ranks, as a fit gives it (Zᵀ H Z = 1): U makes good every error, and what is
    left is float32's rounding, also below zero."""
    of = LowRankSpec(24, 96, 24)
    for _ in range(4):
        x = torch.randn(400, 24) @ torch.randn(24, 24)
        gram = x.mT @ x / 400
        turn = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
        root = torch.linalg.cholesky(gram.double())
        Z = torch.linalg.solve_triangular(root.mT, turn, upper=True).float()
        seen = seen_by_v(of, {"U": torch.randn(96, 24), "V": Z}, gram)
        assert seen is not None
        costs_of(seen.double())  # raises where it is no metric


@pytest.mark.parametrize("of", [DenseSpec(96, 64), *PLAIN], ids=lambda s: s.structure)
def test_statistics_of_the_inputs_take_errors_off_layers(of: Spec) -> None:
    x, weight = _inputs(), torch.randn(64, 96, dtype=torch.float64)
    gram, spec = x.mT @ x / 400, QuantizedSpec(of, 8, 0, fp8=True)
    fitted = plain_fit(gram=gram)(weight, of) if not isinstance(of, DenseSpec) else {"weight": weight}
    exact = restored(of, fitted, torch.float64) if not isinstance(of, DenseSpec) else weight
    lost = []
    for metric in (None, Metric(gram)):
        stored = round_layer(weight, spec, metric, torch.float64, lambda w, s: fitted)
        lost.append(weighted_norm_squared(exact - restored(spec, stored, torch.float64), gram))
    assert lost[1] < 0.9 * lost[0]


@pytest.mark.parametrize("of", [DenseSpec(96, 64), *PLAIN], ids=lambda s: s.structure)
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
    nearest: dict[str, torch.Tensor] = {}
    for name, factor in fitted.items():
        nearest |= pack_factor(spec, name, factor, torch.float32)
    for held in (nearest, round_layer(weight, spec, Metric(gram), torch.float32, fit)):
        found = (held[name] for name in ("U_q", "U_scale", "V_q", "V_scale"))
        u, by_u, v, by_v = (t if t.dim() == 3 else t[None] for t in found)
        made = [t for t in scales_of(by_u, v, by_v) if t is not None]
        kernel = FOLDERS[of.structure]
        y = layer(kernel, quantize_rows(x.float()), (u, v), made, torch.float32)
        missed.append(float((y.double() - exact).norm() / exact.norm()))
    assert missed[1] < share * missed[0]
