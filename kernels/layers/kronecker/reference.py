"""Kronecker-sparse linear layer in plain torch: one batch of small products a factor."""

from collections.abc import Sequence

from torch import Tensor


def kronecker_factor(x: Tensor, w: Tensor) -> Tensor:
    """``x Kᵀ`` for one factor with ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]``.

    The columns and rows of K that share (i, l) form one dense b×c block, so the product is a
    batch of a·d products between two permutations of the features.
    Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 1.

    Args:
        x: [..., a·c·d], any float dtype, contiguous or not.
        w: [a, b, c, d], the dtype of `x`.

    Returns:
        [..., a·b·d] in the dtype of `x`.
    """
    a, b, c, d = w.shape
    batch = x.shape[:-1]
    x = x.reshape(-1, a, c, d).permute(1, 3, 0, 2)  # [a, d, n, c]
    y = x @ w.permute(0, 3, 2, 1)  # [a, d, n, b]
    return y.permute(2, 0, 3, 1).reshape(*batch, a * b * d)


def kronecker_linear(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """``y = K_0 K_1 … K_{L-1} x + bias``: the rightmost factor is applied first.

    Args:
        x: [..., i], any float dtype, contiguous or not.
        factors: L tensors [a, b, c, d], the output side first, the dtype of `x`.
        bias: [o] or None.

    Returns:
        [..., o] in the dtype of `x`.
    """
    for w in reversed(factors):
        x = kronecker_factor(x, w)
    return x if bias is None else x + bias
