"""Kronecker-sparse factorization: recovery, optimality, the weighted metric, Monarch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import RECOVERY, SLACK, TOLERANCES, WEIGHTED_FLOOR
from torch import Tensor

from blr.compressor.base.errors import UsageError
from blr.compressor.structures import kronecker, monarch
from blr.compressor.structures.base import FitOptions, relative_error, weighted_norm_squared
from blr.compressor.structures.patterns import parse_patterns, two_factor_chain
from blr.compressor.structures.specs import KroneckerSpec, MonarchSpec
from blr.kernels.layers.kronecker.reference import kronecker_linear

CHAINS = {
    "two": ("(1,12,6,2)(2,6,8,1)", 16, 24),
    "rank above block": ("(1,3,10,4)(2,20,4,1)", 8, 12),
    "three": ("(1,6,4,4)(2,4,4,2)(4,4,6,1)", 24, 24),
    "not starting at one": ("(2,4,6,2)(4,6,3,1)", 12, 16),
    "strided at the end": ("(1,4,6,4)(3,4,2,2)", 12, 16),
    "one factor": ("(3,4,5,2)", 30, 24),
    "butterfly-16": ("butterfly", 16, 16),
    "butterfly-32": ("butterfly", 32, 32),
    "butterfly-8x32": ("butterfly", 32, 8),
}
SMALL = ["two", "three", "butterfly-16", "butterfly-8x32"]
property_test = settings(max_examples=12)
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On matrices this small threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec_of(name: str) -> KroneckerSpec:
    text, i, o = CHAINS[name]
    return KroneckerSpec(i, o, parse_patterns(text, i, o))


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_factors(spec: KroneckerSpec, seed: int) -> dict[str, Tensor]:
    return {name: randn(*shape, seed=seed) for name, shape in spec.shapes().items()}


def random_gram(i: int, seed: int, tokens: int | None = None) -> Tensor:
    """Strongly correlated inputs; singular when `tokens` < i."""
    x = randn(tokens or 3 * i, i, seed=seed) @ randn(i, i, seed=seed + 1)
    return x.mT @ x


def weighted_error(name: str, weight: Tensor, gram: Tensor | None, rounds: int | None) -> float:
    spec = spec_of(name)
    fitted = kronecker.fit(weight, spec, gram, FitOptions(rounds=rounds))
    return relative_error(weight, kronecker.reconstruct(fitted, spec), gram)


@pytest.mark.parametrize("name", CHAINS)
def test_reconstruct_equals_reference_forward(name: str) -> None:
    spec = spec_of(name)
    factors = random_factors(spec, 0)
    x = torch.eye(spec.in_features, dtype=torch.float64)
    forward = kronecker_linear(x, list(factors.values())).mT
    missed = (kronecker.reconstruct(factors, spec) - forward).norm()
    assert missed <= TOLERANCES[torch.float64] * forward.norm()


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("weighted", [False, True])
@given(seed=seeds)
@property_test
def test_recovers_what_has_the_structure(name: str, weighted: bool, seed: int) -> None:
    spec = spec_of(name)
    weight = kronecker.reconstruct(random_factors(spec, seed), spec)
    gram = random_gram(spec.in_features, seed) if weighted else None
    fitted = kronecker.fit(weight, spec, gram)
    assert {n: tuple(w.shape) for n, w in fitted.items()} == spec.shapes()
    assert relative_error(weight, kronecker.reconstruct(fitted, spec)) <= RECOVERY


@given(seed=seeds, d1=st.sampled_from([1, 2, 4]), a2=st.sampled_from([1, 3]), rank=st.integers(1, 3))
@property_test
def test_two_factors_are_optimal(seed: int, d1: int, a2: int, rank: int) -> None:
    """The error is what the blocks' discarded singular values hold."""
    o, i = 16, 12
    weight = randn(o, i, seed=seed)
    spec = KroneckerSpec(i, o, two_factor_chain(i, o, d1, a2, rank))
    fitted = kronecker.fit(weight, spec)
    missed = weighted_norm_squared(weight - kronecker.reconstruct(fitted, spec))
    blocks = weight.reshape(o // d1, d1, a2, i // a2).permute(1, 2, 0, 3)
    discarded = torch.linalg.svdvals(blocks)[..., rank:].square().sum()
    assert missed == pytest.approx(float(discarded), rel=SLACK)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("tokens", [None, 5], ids=["full", "singular"])
@given(seed=seeds)
@property_test
def test_weighted_is_never_worse(name: str, tokens: int | None, seed: int) -> None:
    """In the weighted norm: no worse than unweighted, and rounds never raise the error."""
    spec = spec_of(name)
    weight = randn(spec.out_features, spec.in_features, seed=seed)
    gram = random_gram(spec.in_features, seed + 7, tokens)
    plain = kronecker.reconstruct(kronecker.fit(weight, spec), spec)
    errors = [relative_error(weight, plain, gram)]
    errors += [weighted_error(name, weight, gram, rounds) for rounds in (0, 1, 2, 4)]
    assert all(b <= a * (1 + SLACK) + WEIGHTED_FLOOR for a, b in pairwise(errors))


@pytest.mark.parametrize("name", ["three", "butterfly-32"])
def test_rounds_without_gram_improve_long_chains(name: str) -> None:
    spec = spec_of(name)
    weight = randn(spec.out_features, spec.in_features, seed=3)
    errors = [weighted_error(name, weight, None, rounds) for rounds in (0, 1, 3)]
    assert errors[2] < errors[1] < errors[0]


def test_one_round_solves_the_left_factor_exactly() -> None:
    """After it, the residual is orthogonal (in H) to every left factor."""
    spec = spec_of("two")
    weight, gram = randn(24, 16, seed=1), random_gram(16, 2)
    start = list(kronecker.fit(weight, spec).values())
    _, residual = kronecker._residual(weight, start, gram)
    solved = kronecker._refitted(start, 0, residual, gram)
    _, residual = kronecker._residual(weight, solved, gram)
    slope = residual @ kronecker._dense(solved[1]).mT
    slope = kronecker._gather(slope, spec.patterns[0])
    assert slope.norm() <= 1e-8 * (weight @ gram).norm() * solved[1].norm()


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("kind", ["zero", "rank one", "zero rows", "tiny", "zero gram"])
def test_degenerate_weights(name: str, kind: str) -> None:
    spec = spec_of(name)
    weight = randn(spec.out_features, spec.in_features, seed=5)
    gram = random_gram(spec.in_features, 6)
    if kind == "zero":
        weight = torch.zeros_like(weight)
    elif kind == "rank one":
        weight = weight[:, :1] * weight[:1]
    elif kind == "zero rows":
        weight[::2] = 0.0
    elif kind == "tiny":
        weight = weight * 1e-30
    else:
        gram = torch.zeros_like(gram)
    for metric in (None, gram):
        fitted = kronecker.fit(weight, spec, metric, FitOptions(rounds=2))
        assert all(bool(w.isfinite().all()) for w in fitted.values())
        assert relative_error(weight, kronecker.reconstruct(fitted, spec), metric) <= 1.0


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_factors_are_balanced_for_storage(dtype: torch.dtype) -> None:
    """Rounding the factors to a storage dtype costs no more than rounding the weight."""
    spec = spec_of("two")
    weight = 1e-6 * kronecker.reconstruct(random_factors(spec, 9), spec)
    stored = {n: w.to(dtype).double() for n, w in kronecker.fit(weight, spec).items()}
    assert relative_error(weight, kronecker.reconstruct(stored, spec)) <= max(
        TOLERANCES[dtype], RECOVERY
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_dtype(dtype: torch.dtype) -> None:
    fitted = kronecker.fit(randn(24, 16, seed=1).to(dtype), spec_of("two"), random_gram(16, 2))
    assert {w.dtype for w in fitted.values()} == {torch.float32}


def test_chain_of_another_size_is_refused() -> None:
    with pytest.raises(UsageError, match="makes a 24x16"):
        kronecker.fit(torch.zeros(16, 16), spec_of("two"))


def monarch_as_kronecker(
    tensors: dict[str, Tensor], spec: MonarchSpec
) -> tuple[list[Tensor], KroneckerSpec, Tensor]:
    """A Monarch weight as the two-factor chain (1, q, b·r', b)(b, b·r', p, 1).

    The blocks are the same ones. The chain counts the output rows with the block index k
    running fastest, and the middle index with s in r' before the block.

    Args:
        tensors: U [b, q, b·r'] and V [b, p, b·r'].

    Returns:
        The factors, their spec, and `rows` [o] (int64) such that
        ``W_monarch = W_chain[rows]``: row k·q + j of Monarch is row j·b + k of the chain.
    """
    b, rank = spec.blocks, spec.block_rank
    p, q = spec.in_features // b, spec.out_features // b
    left = tensors["U"].permute(1, 2, 0)[None]  # [1, q, (t, s), b]
    right = tensors["V"].unflatten(-1, (b, rank)).permute(0, 3, 2, 1)  # [t, s, k, p]
    patterns = ((1, q, b * rank, b), (b, b * rank, p, 1))
    rows = torch.arange(spec.out_features, device=left.device).reshape(q, b).mT.flatten()
    factors = [left.contiguous(), right.reshape(patterns[1])]
    return factors, KroneckerSpec(spec.in_features, spec.out_features, patterns), rows


@given(seed=seeds, b=st.sampled_from([1, 2, 4]), rank=st.integers(1, 3))
@property_test
def test_monarch_is_a_two_factor_chain(seed: int, b: int, rank: int) -> None:
    spec = MonarchSpec(12, 20, b, rank)
    tensors = {name: randn(*shape, seed=seed) for name, shape in spec.shapes().items()}
    factors, chain, rows = monarch_as_kronecker(tensors, spec)
    assert chain.parameters == spec.parameters
    named = dict(zip(chain.shapes(), factors, strict=True))
    dense = kronecker.reconstruct(named, chain)[rows]
    torch.testing.assert_close(dense, monarch.reconstruct(tensors, spec))


def test_monarch_fit_equals_chain_fit_of_permuted_rows() -> None:
    spec = MonarchSpec(12, 20, 2, 3)
    weight = randn(20, 12, seed=4)
    tensors = monarch.fit(weight, spec)
    _, chain, rows = monarch_as_kronecker(tensors, spec)
    permuted = torch.empty_like(weight)
    permuted[rows] = weight
    fitted = kronecker.reconstruct(kronecker.fit(permuted, chain), chain)[rows]
    torch.testing.assert_close(fitted, monarch.reconstruct(tensors, spec))
