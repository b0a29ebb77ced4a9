"""Dense linear algebra that does not fail on singular input: the solvers all families share."""

from __future__ import annotations

import torch
from torch import Tensor

# Cholesky is retried with jitter from the first to the last of these, relative to the mean
# diagonal; beyond that the eigenvalues are clipped.
JITTERS = (0.0, 1e-12, 1e-9, 1e-6)


def solve_spd(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve ``X A = B`` for symmetric positive semi-definite A.

    Args:
        matrix: A [..., r, r].
        right: B [..., m, r], the dtype of `matrix`.

    Returns:
        X [..., m, r]; where A is singular, a solution in its (numerical) range. Deterministic
        and bounded: at most `len(JITTERS)` factorizations, then one eigendecomposition.
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(matrix.dtype).tiny)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for jitter in JITTERS:
        shifted = matrix + (jitter * scale)[..., None, None] * identity
        factor, info = torch.linalg.cholesky_ex(shifted)
        if not bool(info.any()):
            solution = torch.cholesky_solve(right.mT, factor).mT
            if bool(torch.isfinite(solution).all()):
                return solution
    return _solve_clipped(matrix, right, scale)


def _solve_clipped(matrix: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    """``B A⁺`` with eigenvalues under a relative 1e-10 of the largest treated as zero."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    floor = values.amax(-1, keepdim=True).clamp_min(0) * 1e-10 + 1e-300 * scale[..., None]
    inverse = torch.where(values > floor, 1.0 / values.clamp_min(floor), 0.0)
    return (right @ vectors * inverse[..., None, :]) @ vectors.mT


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation ``left @ right.mT`` of each matrix, scales balanced.

    Works through the eigenvectors of the smaller Gram matrix: in float64 that is accurate to
    1e-8 of the largest singular value, far under what any storage dtype keeps, and several
    times faster than a full SVD.

    Args:
        matrix: [..., m, n].
        rank: r; columns beyond the numerical rank are zero.

    Returns:
        left [..., m, r] and right [..., n, r].
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        right, left = truncated_svd(matrix.mT, rank)
        return left, right
    left = top_eigenvectors(matrix @ matrix.mT, rank)
    return balance(left, matrix.mT @ left)


def top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors [..., m, r] of the `rank` largest eigenvalues of gram [..., m, m], padded with
    zero columns when r > m."""
    size = gram.shape[-1]
    _, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    vectors = vectors[..., -min(rank, size) :].flip(-1)
    return torch.nn.functional.pad(vectors, (0, max(rank - size, 0)))


def balance(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale columns so that left [..., m, r] and right [..., n, r] have equal column norms.

    Their product is unchanged; equal scales keep half-precision storage harmless.
    """
    tiny = torch.finfo(left.dtype).tiny
    left_norm = left.norm(dim=-2, keepdim=True).clamp_min(tiny)
    right_norm = right.norm(dim=-2, keepdim=True)
    scale = torch.where(right_norm > 0, (right_norm.clamp_min(tiny) / left_norm).sqrt(), 1.0)
    return left * scale, right / scale
