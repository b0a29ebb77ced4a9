"""What kernels compute that no call of torch computes alike, in plain torch: slow, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.decode.gemv.segments import ACTIVATIONS


def activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``φ(x weightᵀ + bias)`` of x [..., k], weight [m, k], bias [m] or None: [..., m]."""
    return ACTIVATIONS[activation](linear(x, weight, bias))


def cholesky_factor(matrices: Tensor) -> Tensor:
    """Lower L [g, n, n] with ``L Lᵀ = A`` for symmetric positive definite A [g, n, n], of which the
    lower halves are read; NaN from the first column on that has no pivot above zero."""
    left = matrices.tril().clone()
    for k in range(left.shape[-1]):
        left[:, k:, k] /= left[:, k, k].sqrt()[:, None]
        column = left[:, k + 1 :, k]
        left[:, k + 1 :, k + 1 :] -= (column[:, :, None] * column[:, None]).tril()
    return left


def cholesky_solve(lower: Tensor, right: Tensor) -> Tensor:
    """X [g, m, n] with ``X L Lᵀ = B`` for lower L [g, n, n] and B [g, m, n]."""
    y, n = right.clone(), lower.shape[-1]
    for k in range(n):  # Y Lᵀ = B
        y[..., k] = (y[..., k] - torch.einsum("gmj,gj->gm", y[..., :k], lower[:, k, :k])) / _corner(
            lower, k
        )
    for k in reversed(range(n)):  # X L = Y
        later = torch.einsum("gmj,gj->gm", y[..., k + 1 :], lower[:, k + 1 :, k])
        y[..., k] = (y[..., k] - later) / _corner(lower, k)
    return y


def _corner(lower: Tensor, k: int) -> Tensor:
    return lower[:, k, k, None]
