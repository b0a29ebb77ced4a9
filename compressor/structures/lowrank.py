"""Fits low rank in closed form.

``W = U Vᵀ`` minimizing tr((W−W')H(W−W')ᵀ): with Q the top eigenvectors of W H Wᵀ, the factors are
(Q, Wᵀ Q). No inverse of H appears, so a singular H is harmless. Source: Swift-SVD (arXiv 2604.01609).
"""

import torch
from torch import Tensor

from blr.compressor.structures.base import FitOptions, weighted_norm_squared
from blr.compressor.structures.linalg import (
    balance,
    cholesky,
    orthonormal,
    solve_spd,
    top_eigenvectors,
    truncated_svd,
)
from blr.compressor.structures.specs import LowRankSpec


def fit(
    weight: Tensor, spec: LowRankSpec, gram: Tensor | None = None, options: FitOptions = FitOptions()
) -> dict[str, Tensor]:
    """The optimal U [o, r] and V [i, r] for `weight` [o, i] in the norm of `gram` [i, i], with a matrix
    for each group if `spec` has some. Without `gram` this is the truncated SVD, in the dtype of
    `weight`; with it all but the result is computed in float64. Without groups it takes stacks [n, ...],
    too."""
    if spec.groups > 1:
        return _fit_columns(weight, spec, gram) if spec.side == "in" else _fit_rows(weight, spec, gram)
    if gram is None:
        left, right = truncated_svd(weight, spec.rank)
        return {"U": left, "V": right}
    work = weight.double()
    left = _leading(work, gram.double(), spec.rank)
    left, right = balance(left, work.mT @ left)
    return {"U": left.to(weight), "V": right.to(weight)}


def _leading(weight: Tensor, gram: Tensor, rank: int) -> Tensor:
    """Top eigenvectors [..., o, r] of W H Wᵀ. For tall W they come from the smaller problem
    Lᵀ WᵀW L with H = L Lᵀ: the orthonormalized W L P of its eigenvectors P."""
    o, i = weight.shape[-2:]
    if o <= i or rank > i:
        return top_eigenvectors(weight @ gram @ weight.mT, rank)
    half = weight @ cholesky(gram)
    return orthonormal(half @ top_eigenvectors(half.mT @ half, rank))


def _fit_rows(weight: Tensor, spec: LowRankSpec, gram: Tensor | None) -> dict[str, Tensor]:
    """Fit every group of output rows on its own, which is optimal."""
    parts = weight.unflatten(0, (spec.groups, -1))  # [G, o/G, i]
    one = LowRankSpec(spec.in_features, parts.shape[1], spec.rank)
    fits = [fit(part, one, gram) for part in parts]
    return {name: torch.stack([found[name] for found in fits]) for name in "UV"}


def _fit_columns(weight: Tensor, spec: LowRankSpec, gram: Tensor | None) -> dict[str, Tensor]:
    """Fit groups of input columns. That is optimal without `gram`, which couples them; with it the
    better of two starts is taken, V from its blocks and from the plain blocks, each also with all U
    exact."""
    blocks = weight.unflatten(1, (spec.groups, -1)).movedim(1, 0)  # [G, o, i/G]
    left, right = truncated_svd(blocks, spec.rank)
    if gram is None:
        return {"U": left, "V": right}
    work, metric = weight.double(), gram.double()
    diagonal = metric.unflatten(0, (spec.groups, -1)).unflatten(2, (spec.groups, -1))
    one = LowRankSpec(blocks.shape[2], spec.out_features, spec.rank)
    own = [fit(blocks[g].double(), one, diagonal[g, :, g]) for g in range(spec.groups)]
    starts = [(left.double(), right.double())]
    starts.append((torch.stack([t["U"] for t in own]), torch.stack([t["V"] for t in own])))
    tried = [pair for start in starts for pair in (start, _refit_left(work, metric, start[1]))]

    def loss(pair: tuple[Tensor, Tensor]) -> float:
        return weighted_norm_squared(work - _summed(*pair), metric)

    left, right = balance(*min(tried, key=loss))
    return {"U": left.to(weight), "V": right.to(weight)}


def _refit_left(weight: Tensor, gram: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The best U [G, o, r] for given V [G, i/G, r]: W H Z (Zᵀ H Z)⁻¹ with the block diagonal Z of V."""
    groups, _, rank = right.shape
    wide = torch.block_diag(*right)  # [i, G·r]
    left = solve_spd(wide.mT @ gram @ wide, weight @ gram @ wide)
    return left.unflatten(1, (groups, rank)).movedim(1, 0), right


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """The dense weight [o, i] of groups of input columns."""
    return (left @ right.mT).movedim(0, 1).flatten(1)


def right_factor(tensors: dict[str, Tensor], spec: LowRankSpec) -> Tensor:
    """Z [i, r], or [G, i, r] of groups of rows, or [i, G·r] of groups of columns, with ``W = U Zᵀ``."""
    V = tensors["V"]
    return torch.block_diag(*V) if spec.groups > 1 and spec.side == "in" else V


def reconstruct(tensors: dict[str, Tensor], spec: LowRankSpec) -> Tensor:
    """The dense weight [o, i]."""
    left, right = tensors["U"], tensors["V"]
    if spec.groups == 1:
        return left @ right.mT
    return _summed(left, right) if spec.side == "in" else (left @ right.mT).flatten(0, 1)
