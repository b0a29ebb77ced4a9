"""Low-rank factorization in closed form.

``W = U Vᵀ`` minimizing tr((W−W')H(W−W')ᵀ): with Q the top eigenvectors of W H Wᵀ, the factors
are (Q, Wᵀ Q). No inverse and no square root of H appears, so a singular H is harmless.
Source: Swift-SVD (arXiv 2604.01609); equal in error to the Cholesky whitening of SVD-LLM.
"""

from __future__ import annotations

from torch import Tensor

from blr.compressor.structures.base import Fit, FitOptions
from blr.compressor.structures.linalg import balance, top_eigenvectors, truncated_svd
from blr.compressor.structures.specs import LowRankSpec


def fit(
    weight: Tensor,
    spec: LowRankSpec,
    gram: Tensor | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """The optimal U [o, r] and V [i, r] for `weight` [o, i] in the norm of `gram` [i, i].

    Without `gram` this is the truncated SVD. Tensors keep the dtype of `weight`.
    """
    if gram is None:
        left, right = truncated_svd(weight, spec.rank)
        return Fit({"U": left, "V": right})
    left = top_eigenvectors(weight @ gram @ weight.mT, spec.rank)
    left, right = balance(left, weight.mT @ left)
    return Fit({"U": left, "V": right})


def reconstruct(tensors: dict[str, Tensor], spec: LowRankSpec) -> Tensor:
    """The dense weight [o, i]."""
    return tensors["U"] @ tensors["V"].mT
