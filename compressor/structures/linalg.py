"""Linear algebra that does not fail on singular matrices, for the fits of all structures.

Statistics of activations may be singular (dead inputs behind GELU, padded vocabularies). Where a
decomposition of the library fails, it is repeated on the CPU in float64, and that is recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.errors import NumericsError
from blr.kernels.training.cholesky import Factored, factored, is_tiled

# Relative to the mean diagonal, tried in turn
JITTERS = {
    torch.float64: [10.0**power for power in range(-10, 1)],
    torch.float32: [10.0**power for power in range(-6, 1)],
}
FURTHER, NEARER, ITERATIONS = 16, 8, 10  # columns beyond the rank; least share of a matrix; products
SPREAD = 1e-12  # ridge of columns of length 1 in float64
EIGEN, EIGEN_SHIFTS = "eigendecomposition", (1e-10, 1e-7, 1e-4)  # tried when nothing else helps

_fallbacks: ContextVar[list[str] | None] = ContextVar("fallbacks", default=None)


@contextmanager
def recorded_fallbacks() -> Iterator[list[str]]:
    """Collect a line for every kind of retry that solvers need while active."""
    notes: list[str] = []
    token = _fallbacks.set(notes)
    try:
        yield notes
    finally:
        _fallbacks.reset(token)


def record_fallback(note: str) -> None:
    """Add a line to the list of the innermost `recorded_fallbacks`, if one is active."""
    notes = _fallbacks.get()
    if notes is not None and note not in notes:
        notes.append(note)


def add_ridge(matrix: Tensor, ridge: Tensor | float) -> Tensor:
    """`matrix` [..., n, n] with `ridge` added to its diagonal."""
    return matrix + ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor [..., r, r] of symmetric positive semi-definite matrices. The diagonal is
    shifted by a jitter relative to its mean, ten times larger after each failure, at most a dozen times.
    Raises NumericsError for NaN, Inf or strongly negative eigenvalues."""
    jitters = JITTERS[matrix.dtype]
    _, factor, jitter = _shifted(matrix, jitters)
    if jitter > jitters[0]:
        record_fallback(f"Cholesky succeeded with {jitter:.0e} of the mean diagonal added")
    return factor


def definite(gram: Tensor) -> Tensor:
    """Scale `gram` [n, n] to a mean diagonal of 1, and lift eigenvalues below zero by the least shift of
    the diagonal that `cholesky` takes. Sums in single precision leave such where inputs are dependent,
    and a descent would run off along them. Raises NumericsError as `cholesky`."""
    mean = gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    return _shifted((gram + gram.mT) / (2 * mean), [0.0, *JITTERS[gram.dtype]])[0]


def _shifted(matrix: Tensor, shifts: Sequence[float]) -> tuple[Tensor, Tensor, float]:
    """Shift the diagonal of each `matrix` [..., r, r] by the first of `shifts` that makes it positive
    definite, independently of the others of a batch. Returns the shifted matrices, their lower Cholesky
    factors and the largest shift. Raises NumericsError if no shift is enough."""
    scale = _scale(matrix)[..., None]
    taken = torch.full_like(scale, shifts[0])
    for shift, next_shift in zip(shifts, [*shifts[1:], None], strict=True):
        moved = add_ridge(matrix, taken * scale) if shift else matrix
        factor, bad = _cholesky_of_each(moved)
        if not bad.any():
            return moved, factor, shift
        if next_shift is not None:
            taken = torch.where(bad[..., None, None], next_shift, taken)
    raise NumericsError(
        "a normal matrix has no Cholesky factor even with jitter: the weights or the calibration "
        "statistics hold huge or non-finite values; check them, or --exclude the layer"
    )


def rough_cholesky(grams: Tensor) -> Tensor:
    """Rough Cholesky factors of positive semi-definite matrices [..., n, n], for a start or a
    preconditioner: the diagonal's shift starts at √eps and is raised until it succeeds. A zero matrix
    counts as the identity, for its inverse must stay finite."""
    scale = grams.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    scale = torch.where(scale > 0, scale, 1.0)
    for shift in (torch.finfo(grams.dtype).eps ** 0.5, 1e-3, 1e-1, 1.0):
        factor, bad = _cholesky_of_each(add_ridge(grams, shift * scale))
        if not bad.any():
            return factor
        record_fallback("a start or preconditioner without an exact Cholesky factor")
    return add_ridge(torch.zeros_like(grams), scale.sqrt())


def _cholesky_of_each(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors of [..., r, r], and which [...] of the matrices have none."""
    found = _robust(torch.linalg.cholesky_ex, matrix, "Cholesky factorization")
    bad = (found.info != 0) | ~found.L.isfinite().all(-1).all(-1)
    return found.L.to(matrix), bad.to(matrix.device)


def solve_factored(root: Tensor, right: Tensor) -> Tensor:
    """X [..., r, m] with ``L Lᵀ X = B`` for lower L [..., r, r] and B [..., r, m]."""
    return torch.cholesky_solve(right, root)


def solve_upper(root: Tensor, right: Tensor) -> Tensor:
    """X [..., r, m] with ``R X = B`` for upper triangular R [..., r, r] and B [..., r, m]."""
    return torch.linalg.solve_triangular(root, right, upper=True)


def solve_spd(matrix: Tensor, right: Tensor) -> Tensor:
    """X [..., m, r] with ``X A = B`` for symmetric positive semi-definite A [..., r, r] and B
    [..., m, r]; jittered as in `cholesky`."""
    if is_tiled(matrix):
        return _by_tiles(matrix, right)
    return solve_factored(cholesky(matrix), right.mT).mT


def inverse_spd(matrix: Tensor) -> Tensor:
    """Inverse of (a batch of) [r, r] matrices as in `cholesky`; for preconditioners, which are
    applied so often that products beat triangular solves."""
    if is_tiled(matrix):
        return _by_tiles(matrix, torch.eye(matrix.shape[-1], device=matrix.device).expand_as(matrix))
    return torch.cholesky_inverse(cholesky(matrix))


def solve_tiled(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve as `solve_spd` by our kernels, with the least jitter only: NaN for a matrix that needs more.
    Waits for no GPU."""
    return _tiles(matrix).solve(right)


def _by_tiles(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve as `solve_spd` by our kernels. A matrix that needs more than the least jitter is solved
    alone, so that its result does not depend on the batch: processes share systems out."""
    tiles = _tiles(matrix)
    solved = tiles.solve(right)
    for n in tiles.unsound():
        solved[n] = solve_factored(cholesky(matrix[n]), right[n].mT).mT
    return solved


def _tiles(matrix: Tensor) -> Factored:
    return factored(add_ridge(matrix, JITTERS[matrix.dtype][0] * _scale(matrix)[..., None]))


def _scale(matrix: Tensor) -> Tensor:
    """The mean diagonals [..., 1], none of them zero, that jitters are multiplied by."""
    tiny = torch.finfo(matrix.dtype).tiny * 1e10
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(tiny)


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation ``left @ right.mT`` of rank r of each matrix [..., m, n]: left [..., m, r]
    and right [..., n, r] of even scales, with zero columns beyond the numerical rank. It takes the
    eigenvectors of the smaller Gram matrix, which is several times faster than an SVD and in float64
    accurate to 1e-8 of the largest singular value, far below what any storage dtype keeps."""
    if matrix.shape[-2] > matrix.shape[-1]:
        right, left = truncated_svd(matrix.mT, rank)
        return left, right
    left = top_eigenvectors(matrix @ matrix.mT, rank)
    return balance(left, matrix.mT @ left)


def top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Eigenvectors [..., m, r] of the `rank` largest eigenvalues of gram [..., m, m], padded with
    zero columns when r > m. Of a stack a GPU finds them by `near_eigenvectors`."""
    size = gram.shape[-1]
    if gram.is_cuda and gram.dim() == 3 and NEARER * (rank + FURTHER) <= size:
        return near_eigenvectors(gram, rank)
    even = (gram + gram.mT) / 2
    vectors = _robust(lambda m: torch.linalg.eigh(m).eigenvectors, even, EIGEN, EIGEN_SHIFTS).to(gram)
    vectors = vectors[..., -min(rank, size) :].flip(-1)  # by falling eigenvalue
    return torch.nn.functional.pad(vectors, (0, max(rank - size, 0)))


def near_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """`top_eigenvectors` of a stack [n, m, m], nearly, by iterating a wider subspace: products of all at
    once, where the library decomposes one whole matrix after the other."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(gram.shape[-1], rank + FURTHER, generator=random, dtype=torch.float64)
    basis = start.to(gram).expand(len(gram), -1, -1)
    for _ in range(ITERATIONS):
        basis = _spread(gram @ basis)
    basis = orthonormal(basis)
    return basis @ top_eigenvectors((basis.mT @ gram @ basis).contiguous(), rank)


def _spread(basis: Tensor) -> Tensor:
    """Columns [n, m, r] that span nearly those of `basis` and are nearly orthonormal, by Cholesky
    factors: all at once, and without waiting, where a QR decomposition takes one after the other."""
    basis = basis / basis.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(basis.dtype).tiny)
    root = torch.linalg.cholesky_ex(add_ridge(basis.mT @ basis, SPREAD)).L
    return torch.linalg.solve_triangular(root, basis.mT, upper=False).mT


def eigenvalues(gram: Tensor) -> Tensor:
    """Falling eigenvalues [..., m] of positive semi-definite matrices [..., m, m], none negative."""
    found: Tensor = _robust(torch.linalg.eigvalsh, gram, EIGEN, EIGEN_SHIFTS)
    return found.to(gram).flip(-1).clamp_min(0)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns [..., m, min(m, n)] that span those of `matrix` [..., m, n], also where
    these are dependent."""
    return _robust(lambda m: torch.linalg.qr(m).Q, matrix, "QR decomposition").to(matrix)


def _robust(
    call: Callable[[Tensor], Any], matrix: Tensor, name: str, shifts: Sequence[float] = ()
) -> Any:
    """``call(matrix)``, a decomposition called `name`. Where the library fails it is repeated on the
    CPU in float64, then with `shifts` of the diagonal. These are relative and distinct, and separate
    the eigenvalues it trips over. Raises NumericsError."""
    if (found := _attempted(call, matrix)) is not None:
        return found
    if not bool(matrix.isfinite().all()):
        raise NumericsError(
            f"a {matrix.shape[-2]}x{matrix.shape[-1]} matrix to decompose holds NaN or Inf: the weights "
            "or the calibration statistics overflow; check text and checkpoint, or --exclude the layer"
        )
    wide = matrix.to("cpu", torch.float64)
    scale = wide.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None]
    ramp = torch.linspace(0, 1, wide.shape[-1], dtype=wide.dtype).diag()
    for shift in (0.0, *shifts):
        if (found := _attempted(call, wide + shift * scale * ramp if shift else wide)) is not None:
            record_fallback(f"{name} repeated on the CPU" + f", shifted by {shift:.0e}" * bool(shift))
            return found
    raise NumericsError(
        f"the {name} of a {wide.shape[-2]}x{wide.shape[-1]} matrix did not converge in "
        f"{len(shifts) + 2} attempts; --exclude the layer"
    )


def _attempted(call: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """``call(matrix)``; None where the library fails on it, by an error or, as libraries of a GPU do for
    some singular matrices, by NaN without one. A result that itself says it has no factor is no
    failure."""
    try:
        found = call(matrix)
    except RuntimeError as error:
        if not isinstance(error, torch.linalg.LinAlgError) and "cusolver" not in str(error).lower():
            raise
        return None
    factor = found if isinstance(found, Tensor) else found.L
    said = not isinstance(found, Tensor) and bool(found.info.any())
    return found if said or bool(factor.isfinite().all()) else None


def balance(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale columns so that left [..., m, r] and right [..., n, r] have equal column norms: their
    product stays, and half precision holds both."""
    tiny = torch.finfo(left.dtype).tiny
    left_norm = left.norm(dim=-2, keepdim=True).clamp_min(tiny)
    right_norm = right.norm(dim=-2, keepdim=True)
    scale = torch.where(right_norm > 0, (right_norm.clamp_min(tiny) / left_norm).sqrt(), 1.0)
    return left * scale, right / scale


def mixed_gram(mix: Tensor, overlap: Tensor) -> Tensor:
    """``Σ_l (s_l s_lᵀ) ∘ G_l`` [b, r, r] for every row of mix S [b, l, r] and overlap G [l, r, r]. One
    row at a time: the einsum of it would hold all [b, l, r, r] products."""
    return torch.stack([(row[:, :, None] * overlap * row[:, None]).sum(0) for row in mix])


def in_blocks(weight: Tensor, blocks: int) -> Tensor:
    """Blocks [k, l, q, p] of W [o, i], `blocks` along each side; q = o/b, p = i/b."""
    o, i = weight.shape
    return weight.reshape(blocks, o // blocks, blocks, i // blocks).transpose(1, 2)
