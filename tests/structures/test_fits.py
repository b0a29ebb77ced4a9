"""What every factorizer promises: optimal where a closed form exists, never rising, never worse
than the simpler family or the unweighted fit, and unharmed by singular input."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.compressor.fitting.rounding import quantize_factors
from blr.compressor.structures import blast, lowrank, monarch
from blr.compressor.structures.base import FitOptions, relative_error
from blr.compressor.structures.descent import descend
from blr.compressor.structures.linalg import definite
from blr.compressor.structures.packing import restored
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)

FAMILIES: list[Spec] = [
    *(LowRankSpec(64, 48, 8), MonarchSpec(64, 48, 4, 2), BlastSpec(64, 48, 4, 8)),
    KroneckerSpec(64, 48, ((1, 12, 8, 4), (4, 8, 16, 1))),
]
SLACK = 1 + 1e-9  # rounding of float64 in quantities that are equal in exact arithmetic
repeatable = settings(max_examples=15)
problems = st.builds(
    lambda seed, o, i, tokens: _problem(seed, 4 * o, 4 * i, tokens),
    st.integers(0, 2**16),
    st.integers(2, 6),
    st.integers(2, 6),
    st.sampled_from([3, 40]),
)


def _problem(seed: int, o: int, i: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [o, i] and a Gram matrix of uneven, correlated inputs, singular for few tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(tokens, i) @ (draw(i, i) * torch.logspace(0, -3, i, dtype=torch.float64))
    return draw(o, i), x.T @ x


def error(module, weight, spec, gram=None, norm=None, **options) -> float:  # type: ignore[no-untyped-def]
    """Relative error in `norm` of the fit of `weight` under `gram`."""
    fit = module.fit(weight, spec, gram, FitOptions(**options))
    return relative_error(weight, module.reconstruct(fit, spec), norm)


@repeatable
@given(problems, st.integers(1, 8))
def test_low_rank_is_the_truncated_svd(problem, rank) -> None:  # type: ignore[no-untyped-def]
    weight, _ = problem
    values = torch.linalg.svdvals(weight)
    best = float(values[rank:].norm() / values.norm())
    o, i = weight.shape
    assert error(lowrank, weight, LowRankSpec(i, o, rank)) == pytest.approx(best, abs=1e-6)


@repeatable
@given(problems, st.integers(1, 7))
def test_weighted_low_rank_reaches_the_whitened_optimum(problem, rank) -> None:  # type: ignore[no-untyped-def]
    weight, gram = problem
    values, vectors = torch.linalg.eigh(gram)
    whitened = weight @ vectors * values.clamp_min(0).sqrt()
    singular = torch.linalg.svdvals(whitened)
    best = float(singular[rank:].norm() / singular.norm())
    o, i = weight.shape
    found = error(lowrank, weight, LowRankSpec(i, o, rank), gram, gram)
    assert found == pytest.approx(best, abs=1e-5)


@repeatable
@given(problems, st.integers(1, 6), st.sampled_from([1, 2, 4]))
def test_blast_is_never_worse_than_low_rank(problem, rank, blocks) -> None:  # type: ignore[no-untyped-def]
    weight, gram = problem
    o, i = weight.shape
    for norm in (None, gram):
        low = error(lowrank, weight, LowRankSpec(i, o, rank), norm, norm)
        found = error(blast, weight, BlastSpec(i, o, blocks, rank), norm, norm, rounds=5)
        assert found <= low * SLACK + 1e-6


@repeatable
@given(problems, st.sampled_from(["blast", "monarch"]))
def test_weighted_fits_are_never_worse_than_unweighted_in_their_norm(problem, name) -> None:  # type: ignore[no-untyped-def]
    weight, gram = problem
    o, i = weight.shape
    module, spec = {
        "blast": (blast, BlastSpec(i, o, 2, 3)),
        "monarch": (monarch, MonarchSpec(i, o, 2, 2)),
    }[name]
    weighted = error(module, weight, spec, gram, gram)
    assert weighted <= error(module, weight, spec, None, gram) * SLACK + 1e-5


@repeatable
@given(problems, st.booleans())
def test_losses_fall_with_every_round(problem, weigh) -> None:  # type: ignore[no-untyped-def]
    weight, gram = problem
    o, i = weight.shape
    metric = definite(gram)
    fits: list[Any] = [blast.BlastProblem(weight, metric if weigh else None, BlastSpec(i, o, 2, 3))]
    fits.append(monarch.MonarchProblem(weight, metric, MonarchSpec(i, o, 2, 1)))
    for fit in fits:
        _, losses = descend(fit, fit.start(), 100)
        assert all(later < earlier for earlier, later in pairwise(losses))


def test_more_rounds_lower_the_error() -> None:
    weight, gram = _problem(3, 24, 32, 60)
    spec = BlastSpec(32, 24, 4, 6)
    errors = [error(blast, weight, spec, gram, gram, rounds=n) for n in (0, 3, 30)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("solver", ["varpro", "precgd"])
def test_blast_recovers_a_weight_that_has_its_structure(solver: str) -> None:
    spec = BlastSpec(24, 16, 4, 2)
    generator = torch.Generator().manual_seed(5)
    factors = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in spec.shapes().items()
    }
    weight = blast.reconstruct(factors, spec)
    found = error(blast, weight, spec, solver=solver, rounds=200)
    assert found < {"varpro": 1e-3, "precgd": 0.3}[solver]  # precgd stops in a local minimum


@pytest.mark.parametrize("weigh", [False, True])
def test_blasts_gradient_is_that_of_its_loss(weigh: bool) -> None:
    """Also of what rounding is expected to lose: along a line, against differences."""
    weight, gram = _problem(3, 12, 16, 40)
    problem = blast.BlastProblem(weight, gram if weigh else None, BlastSpec(16, 12, 4, 3), noise=0.3)
    theta = problem.start()
    theta = theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).double()
    _, gradient = problem.evaluate(theta)
    along, step = torch.nn.functional.normalize(gradient, dim=0), 1e-6
    ahead, behind = (problem.evaluate(theta + sign * step * along)[0] for sign in (1, -1))
    assert (behind - ahead) / (2 * step) == pytest.approx(2 * float(gradient @ along), rel=1e-4)


def test_blast_computes_the_same_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """H Z_k of products that all block rows share, and each by itself; blocks of any number."""
    weight, gram = _problem(3, 12, 16, 40)
    for blocks in (2, 4):
        found = []
        for room in (blast.SPREAD_BYTES, 0):
            monkeypatch.setattr(blast, "SPREAD_BYTES", room)
            problem = blast.BlastProblem(weight, gram, BlastSpec(16, 12, blocks, 3), noise=0.3)
            noise = torch.randn(problem.start().shape, generator=torch.Generator().manual_seed(1))
            assert (problem._shared(problem.split(noise.double())[1]) is None) == (room == 0)
            loss, gradient = problem.evaluate(problem.start() + 0.1 * noise.double())
            found.append(torch.cat([gradient, gradient.new_tensor([loss])]))
        torch.testing.assert_close(*found)
        monkeypatch.undo()


def test_terms_that_will_be_rounded_do_not_cancel() -> None:
    """A weight that has no such structure: in int4 the bounded fit loses far less, without it little."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    spec = BlastSpec(64, 64, 4, 24)
    packed = QuantizedSpec(spec, 4, 32)
    found = {}
    for noise in (0.0, 0.02):
        fitted = blast.fit(weight, spec, None, FitOptions(rounds=60, noise=noise))
        stored = quantize_factors(packed, fitted, torch.float32).tensors
        exact = relative_error(weight, blast.reconstruct(fitted, spec))
        found[noise] = exact, relative_error(weight, restored(packed, stored, torch.float64))
    assert found[0.02][0] < 1.1 * found[0.0][0]
    assert found[0.02][1] < 0.95 * found[0.0][1]


def test_precgd_follows_its_seed() -> None:
    weight, _ = _problem(1, 8, 12, 4)
    fits = [
        blast.fit(weight, BlastSpec(12, 8, 2, 3), None, FitOptions("precgd", 20, seed))["S"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("weigh", [False, True])
def test_exact_low_rank_and_zero_weights_are_met(rank: int, weigh: bool) -> None:
    left, gram = _problem(2, 16, 8, 40)
    weight = left[:, :rank] @ torch.ones(rank, 8, dtype=torch.float64).cumsum(1)
    norm = gram if weigh else None
    for module, spec in (
        (lowrank, LowRankSpec(8, 16, 4)),
        (monarch, MonarchSpec(8, 16, 2, 2)),
        (blast, BlastSpec(8, 16, 2, 4)),
    ):
        assert error(module, weight, spec, norm) < 1e-4
        assert error(module, weight, spec, norm) == error(module, weight, spec, norm)


@pytest.mark.parametrize(("o", "i"), [(1, 8), (8, 1), (1, 1)])
def test_vectors_are_layers_too(o: int, i: int) -> None:
    weight = torch.arange(1.0, o * i + 1, dtype=torch.float64).reshape(o, i)
    for module, spec in ((lowrank, LowRankSpec(i, o, 1)), (blast, BlastSpec(i, o, 1, 1))):
        assert error(module, weight, spec) < 1e-6


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.structure)
def test_inputs_that_repeat_leave_no_direction_to_run_off_along(spec: Spec, kinds: int) -> None:
    """Their Gram matrix, of sums in single precision, has eigenvalues below zero."""
    generator = torch.Generator().manual_seed(kinds)
    x = torch.randn(kinds, 64, generator=generator).repeat(512 // kinds, 1)
    weight = torch.randn(48, 64, generator=generator, dtype=torch.float64)
    gram, exact = (x.mT @ x).double(), x.double().mT @ x.double()
    assert float(torch.linalg.eigvalsh(gram)[0]) < -1e-8 * float(gram.diagonal().mean())
    module = STRUCTURES[spec.structure].factorizer()
    fit = module.fit(weight, spec, gram, FitOptions(noise=5e-4))
    found = module.reconstruct(fit, spec)
    assert relative_error(weight, found, exact) < 1e-4
    assert float(found.norm()) < 2 * float(weight.norm())


def test_factors_have_comparable_scales() -> None:
    weight, _ = _problem(4, 16, 16, 40)
    for factor in blast.fit(1e6 * weight, BlastSpec(16, 16, 4, 4)).values():
        assert factor.abs().max() < 1e4  # each carries a third of the exponent, far from fp16's limit
