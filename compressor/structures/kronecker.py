"""Fits Kronecker-sparse factors for any chain of patterns.

A *twiddle* [a, b, c, d] is a factor, or a product of neighbouring factors, stored without its zeros as
in `KroneckerSpec`. Source: "Butterfly Factorization with Error Guarantees" (arXiv 2411.04506).
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from blr.compressor.structures import linalg
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.patterns import validate_chain
from blr.compressor.structures.specs import KroneckerSpec, Pattern
from blr.kernels.layers.kronecker.reference import kronecker_factor

DEFAULT_ROUNDS = 20  # with a Gram matrix; without one the hierarchical result is kept
CG_STEPS = 8  # of one factor's refit
STALLED = 1e-4  # a round that lowers the squared error by less than this share is the last
ROUNDING = 100  # times eps and ‖W‖² in the metric: how far a computed error is off
SWEEPS = 3  # of balancing over the pairs of neighbours in a chain

Operator = Callable[[Tensor], Tensor]


def fit(
    weight: Tensor, spec: KroneckerSpec, gram: Tensor | None = None, options: FitOptions = FitOptions()
) -> dict[str, Tensor]:
    """Factors ``factors.n`` [a, b, c, d] of `weight` [o, i] in the norm of `gram` [i, i], in the dtype
    of `weight`, or float32 for half precision; float64 is advised. `options.rounds` defaults to 0
    without `gram`; with it to at most `DEFAULT_ROUNDS`, and the weighted error is never larger than that
    of the unweighted fit. Raises UsageError for patterns that are no chain for this weight.

    Factors are split off one by one from the left, each split being one batch of truncated SVDs. All
    but the last are isometries on every block, so the error of a later split is that of the product;
    for two factors the result is optimal. Given `gram` they are then refitted in turn in its norm.
    """
    validate_chain(spec.patterns, weight.shape[1], weight.shape[0])
    weight = weight.float() if weight.dtype.itemsize < 4 else weight
    gram = linalg.definite(gram.to(weight)) if gram is not None and bool(gram.any()) else None
    starts = [_hierarchical(weight, spec.patterns, None)]
    if gram is not None:
        starts.append(_hierarchical(weight, spec.patterns, gram))
    rounds = options.rounds if options.rounds is not None else DEFAULT_ROUNDS * (gram is not None)
    factors = _refine(weight, starts, gram, rounds)
    return {f"factors.{n}": w for n, w in enumerate(_balanced(factors))}


def reconstruct(tensors: dict[str, Tensor], spec: KroneckerSpec) -> Tensor:
    """The dense weight [o, i]: blocks multiplied pattern by pattern, no sparse factor is formed."""
    return _dense(_product([tensors[name] for name in spec.shapes()]))


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """The twiddle [a1, b1·D, A·c2, d2] of a product of two, with A = a2/a1 and D = d1/d2: one matrix
    product over the block rank for each (a1, A, D, d2)."""
    (a1, b1, c1, d1), (a2, _, c2, d2) = left.shape, right.shape
    times, strides = a2 // a1, d1 // d2
    rank = c1 // times
    rows = left.reshape(a1, b1, times, rank, strides, d2).permute(0, 2, 4, 5, 1, 3)
    columns = right.reshape(a1, times, rank, strides, c2, d2).permute(0, 1, 3, 5, 2, 4)
    blocks = (rows @ columns).permute(0, 4, 2, 1, 5, 3)  # [a1, b1, D, A, c2, d2]
    return blocks.reshape(a1, b1 * strides, times * c2, d2)


def _product(factors: Sequence[Tensor]) -> Tensor:
    return reduce(_multiply, factors)


def _support(matrix: Tensor, pattern: Pattern) -> Tensor:
    """The entries [b, c, a, d] of `matrix` [abd, acd] on the support of `pattern`, as a view."""
    a, b, c, d = pattern
    return matrix.view(a, b, d, a, c, d).diagonal(0, 0, 3).diagonal(0, 1, 3)


def _gather(matrix: Tensor, pattern: Pattern) -> Tensor:
    """The twiddle of `matrix` [abd, acd] restricted to the support of `pattern`."""
    return _support(matrix.contiguous(), pattern).permute(2, 0, 1, 3).contiguous()


def _dense(twiddle: Tensor) -> Tensor:
    """The dense matrix [abd, acd] of a twiddle [a, b, c, d]."""
    a, b, c, d = twiddle.shape
    if a == d == 1:
        return twiddle.reshape(b, c)
    matrix = twiddle.new_zeros(a * b * d, a * c * d)
    _support(matrix, (a, b, c, d)).copy_(twiddle.permute(1, 2, 0, 3))
    return matrix


def _hierarchical(weight: Tensor, patterns: Sequence[Pattern], gram: Tensor | None) -> list[Tensor]:
    """Split factors off from the left, in the norm of the diagonal blocks of `gram`."""
    a, d = patterns[0][0], patterns[-1][3]
    o, i = weight.shape
    rest = _gather(weight, (a, o // (a * d), i // (a * d), d))
    factors = []
    for left, right in pairwise(patterns):
        factor, rest = _split(rest, left, right, gram)
        factors.append(factor)
    return [*factors, rest]


def _split(twiddle: Tensor, left: Pattern, right: Pattern, gram: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split `twiddle` into left [a1, b1, c1, d1] times the rest [a2, b2, ·, d], by truncating each block
    to rank r. The left factor has orthonormal columns in each block."""
    (a1, b1, c1, d1), a2, d = left, right[0], twiddle.shape[3]
    times, strides = a2 // a1, d1 // d
    rank = c1 // times
    blocks = twiddle.reshape(a1, b1, strides, times, -1, d).permute(0, 3, 2, 5, 1, 4)
    columns = blocks.shape[-1]
    measured = blocks  # [a1, A, D, d, b1, columns]
    if gram is not None:
        roots = linalg.rough_cholesky(_gather(gram, (a2, columns, columns, d)).permute(0, 3, 1, 2))
        measured = blocks @ roots.reshape(a1, times, 1, d, columns, columns)
    basis = _left_vectors(measured, rank)  # [a1, A, D, d, b1, r]
    rest = basis.mT @ blocks
    factor = basis.permute(0, 4, 1, 5, 2, 3).reshape(left)
    return factor, rest.permute(0, 1, 4, 2, 5, 3).reshape(a2, rank * strides, columns, d)


def _left_vectors(blocks: Tensor, rank: int) -> Tensor:
    """Orthonormal [..., m, r] that span the leading left singular vectors of blocks [..., m, n];
    zero columns where r > m. Zero and rank-deficient blocks are harmless."""
    blocks = blocks / blocks.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30)
    if blocks.shape[-2] <= blocks.shape[-1]:
        return linalg.top_eigenvectors(blocks @ blocks.mT, rank)
    basis = linalg.orthonormal(blocks @ linalg.top_eigenvectors(blocks.mT @ blocks, rank))
    return torch.nn.functional.pad(basis, (0, rank - basis.shape[-1]))


def _refine(
    weight: Tensor, starts: list[list[Tensor]], gram: Tensor | None, rounds: int
) -> list[Tensor]:
    """Refit the factors of the best start in turn; their error never rises."""
    states = [(*_residual(weight, start, gram), start) for start in starts]
    error, residual, factors = min(states, key=lambda state: state[0])
    # Steps that gain less than rounding are refused: at an exact fit with a singular H they would
    # only let the factors drift in directions that H does not see.
    least = ROUNDING * torch.finfo(weight.dtype).eps * _residual(weight, None, gram)[0]
    for _ in range(rounds):
        before = error
        for n in range(len(factors)):
            tried = _refitted(factors, n, residual, gram)
            tried_error, tried_residual = _residual(weight, tried, gram)
            if tried_error < error - least:
                error, residual, factors = tried_error, tried_residual, tried
        if not error < before * (1 - STALLED):
            break
    return factors


def _residual(weight: Tensor, factors: list[Tensor] | None, gram: Tensor | None) -> tuple[float, Tensor]:
    """The error tr(E H Eᵀ) and E H, for E = W − W', with W' = 0 without factors."""
    error = weight if factors is None else weight - _dense(_product(factors))
    weighted = error if gram is None else error @ gram
    return float((error * weighted).sum()), weighted


def _refitted(factors: list[Tensor], n: int, residual: Tensor, gram: Tensor | None) -> list[Tensor]:
    """Move factor n towards the least weighted error, the others fixed. With L and R the products left
    and right of it, the correction Δ solves ``support(LᵀL Δ R H Rᵀ) = support(Lᵀ (E H) Rᵀ)``."""
    a, b, c, d = factors[n].shape
    pattern = (a, b, c, d)
    left = _product(factors[:n]) if n else None
    right = _product(factors[n + 1 :]) if n + 1 < len(factors) else None
    slope = residual if right is None else kronecker_factor(residual, right)
    slope = slope if left is None else kronecker_factor(slope.mT, left.transpose(1, 2)).mT
    left_gram, right_gram = _left_gram(left), _right_gram(right, gram)

    def curvature(step: Tensor) -> Tensor:
        # R H Rᵀ is symmetric, so Δ (R H Rᵀ) is the transpose of (R H Rᵀ) Δᵀ.
        moved = _dense(step) if right_gram is None else kronecker_factor(right_gram, step).mT
        moved = moved if left_gram is None else kronecker_factor(moved.mT, left_gram).mT
        return _gather(moved, pattern)

    solve = _preconditioner(pattern, left_gram, right_gram)
    step = _conjugate_gradients(curvature, solve, _gather(slope, pattern))
    return [*factors[:n], factors[n] + step, *factors[n + 1 :]]


def _left_gram(left: Tensor | None) -> Tensor | None:
    """LᵀL as a twiddle [a, c, c, d]; None stands for the identity."""
    if left is None:
        return None
    blocks = left.permute(0, 3, 1, 2)
    return (blocks.mT @ blocks).permute(0, 2, 3, 1)


def _right_gram(right: Tensor | None, gram: Tensor | None) -> Tensor | None:
    """R H Rᵀ, dense; None stands for the identity."""
    if right is None:
        return gram
    half = _dense(right).mT if gram is None else kronecker_factor(gram, right)  # H Rᵀ
    return kronecker_factor(half.mT, right)


def _preconditioner(pattern: Pattern, left_gram: Tensor | None, right_gram: Tensor | None) -> Operator:
    """The inverse of the curvature within each b×c block, that is of all of it for the outermost
    left factor, and for the outermost right one without H."""
    a, b, c, d = pattern
    rows = None if left_gram is None else _dense(left_gram)
    roots = [
        None if g is None else linalg.rough_cholesky(_gather(g, (a, n, n, d)).permute(0, 3, 1, 2))
        for g, n in ((rows, b), (right_gram, c))
    ]

    def solve(slope: Tensor) -> Tensor:
        blocks = slope.permute(0, 3, 1, 2)  # [a, d, b, c]
        if roots[0] is not None:
            blocks = linalg.solve_factored(roots[0], blocks)
        if roots[1] is not None:
            blocks = linalg.solve_factored(roots[1], blocks.mT).mT
        return blocks.permute(0, 2, 3, 1)

    return solve


def _conjugate_gradients(apply: Operator, solve: Operator, right: Tensor) -> Tensor:
    """x with apply(x) ≈ right for positive semi-definite `apply` by `CG_STEPS` preconditioned
    steps. Directions without curvature (a singular H) end it early."""
    x, residual = torch.zeros_like(right), right
    direction = solve(residual)
    product = first = float((residual * direction).sum())
    for _ in range(CG_STEPS):
        image = apply(direction)
        bend = float((direction * image).sum())
        if not (product > 1e-14 * first and bend > 0):
            break
        rate = product / bend
        x, residual = x + rate * direction, residual - rate * image
        following = solve(residual)
        fresh = float((residual * following).sum())
        direction, product = following + fresh / product * direction, fresh
    return x


def _balanced(factors: list[Tensor]) -> list[Tensor]:
    """Rescale the indices between factors so that neighbours have equal column and row norms: the
    product stays, and half precision holds all factors."""
    factors = list(factors)
    for _ in range(SWEEPS if len(factors) > 2 else 1):
        for n in reversed(range(len(factors) - 1)):
            factors[n], factors[n + 1] = _balanced_pair(factors[n], factors[n + 1])
    return [factor.contiguous() for factor in factors]


def _balanced_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    (a1, b1, c1, d1), (a2, b2, c2, d2) = left.shape, right.shape
    columns = left.permute(1, 0, 2, 3).reshape(b1, -1)  # [b1, middle]
    rows = right.permute(2, 0, 1, 3).reshape(c2, -1)  # [c2, middle]
    columns, rows = linalg.balance(columns, rows)
    left = columns.reshape(b1, a1, c1, d1).permute(1, 0, 2, 3)
    return left, rows.reshape(c2, a2, b2, d2).permute(1, 2, 0, 3)
