"""A variant is chosen once for the shapes of a call, the plain form where ours is not faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blr.bench import tuning as tune
from blr.bench.tuning_rules import Candidate, TunedPoint, rules_of
from blr.kernels.common import dispatch, tables
from blr.kernels.common.tables import Shape
from blr.kernels.layers import structured
from blr.kernels.layers.lowrank import op as lowrank_op


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, 4), torch.randn(4, 12).t(), torch.randn(10)


def test_a_shape_is_planned_once(factors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A new plan for another shape, dtype or bias, and after `forget`; none with gradients."""
    made: list[Any] = []
    usual = structured.plan
    monkeypatch.setattr(structured, "plan", lambda *given: made.append(given) or usual(*given))
    dispatch.forget()
    U, V, bias = factors
    wide = [t.double() for t in factors]
    with torch.no_grad():
        for x in (torch.randn(2, 3, 12), torch.randn(2, 3, 12), torch.randn(6, 12)):
            torch.testing.assert_close(lowrank_op.lowrank_linear(x, U, V, bias), x @ V @ U.T + bias)
        assert len(made) == 2
        lowrank_op.lowrank_linear(x, U, V)
        lowrank_op.lowrank_linear(x.double(), *wide)
        assert len(made) == 4
        dispatch.forget()
        lowrank_op.lowrank_linear(x, U, V)
        assert len(made) == 5
        with pytest.raises(TypeError, match="cast one of them"):
            lowrank_op.lowrank_linear(x, U, V, bias.double())
        with pytest.raises(ValueError, match="inputs of 6 features, expected 12"):
            lowrank_op.lowrank_linear(x[:, :6], U, V, bias)
    made.clear()
    lowrank_op.lowrank_linear(x, U, V)
    assert made == []


@pytest.mark.parametrize("structure", ["lowrank", "monarch", "blast"])
def test_the_plain_form_runs_where_ours_is_not_faster(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured by a timer that says so: ours wins at 4 tokens, is within noise at 16, loses at 64; what
    runs between them is the choice of the next number above."""
    plain, *_ = tables.PLAIN[structure]
    ours = {"lowrank": "narrow", "monarch": "narrow", "blast": "narrow"}[structure]
    times = {4: (1.0, 2.0), 16: (1.0, 1.02), 64: (1.5, 1.0)}
    shape = Shape(64, 64, 1 if structure == "lowrank" else 4, 16)
    points = [
        TunedPoint(structure, shape, "float32", n, {ours: t[0], plain: t[1], "dense": 3.0})
        for n, t in times.items()
    ]
    rules = rules_of(points, {c.label: c for c in map(Candidate, (ours, plain, "dense"))})
    monkeypatch.setattr(tables, "tuned_rules", lambda gpu: rules)
    tables._choose.cache_clear()
    monkeypatch.setattr(dispatch, "kernel_device", lambda tensor: True)
    ran: list[str] = []
    table = {name: lambda x, bias, name=name: ran.append(name) or x for name in (ours, plain)}
    other = Shape(128, 64, shape.blocks, 8)  # not measured
    for size in (shape, other):
        ran.clear()
        for n in (1, 3, 4, 5, 16, 17, 64, 65, 5000):
            given = (torch.zeros(n, size.inputs), (), None)
            dispatch.dispatch(structure, size, lambda: table, None, *given)
        assert ran == [ours] * 3 + [plain] * 6
    monkeypatch.undo()
    dispatch.forget()


def test_every_plain_form_is_timed() -> None:
    for structure in ("svd", "monarch", "blast"):
        table = tune.variants_of(structure)
        plain = tables.PLAIN[tables.FOLDERS[structure]]
        assert plain and set(plain) <= set(table)
        for n in tune.FULL:
            assert set(plain) <= {candidate.variant for candidate in tune.candidates(structure, n)}
