"""Low-rank linear layer in plain torch: ``y = (x V) Uᵀ + bias``, whole or in groups of heads."""

import torch
from torch import Tensor


def lowrank_linear(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two products through the rank.

    Args:
        x: [..., i], any float dtype, contiguous or not.
        U: [o, r] and V: [i, r], the dtype of `x`.
        bias: [o] or None.

    Returns:
        [..., o] in the dtype of `x`.
    """
    return torch.nn.functional.linear(x @ V, U, bias)


def grouped_lowrank_linear(
    x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None, *, side: str = "out"
) -> Tensor:
    """Two products through the ranks of G groups.

    Args:
        x: [..., i], any float dtype, contiguous or not.
        U, V: with `side` "out" [G, o/G, r] and [G, i, r], each group giving its own outputs
            ``y_g = (x V_g) U_gᵀ``; with "in" [G, o, r] and [G, i/G, r], each group taking its own
            inputs, ``y = Σ_g (x_g V_g) U_gᵀ``. The dtype of `x`.
        bias: [o] or None.

    Returns:
        [..., o] in the dtype of `x`.
    """
    groups, _, rank = U.shape
    if side == "out":
        # One product over all groups; V stored [G, r, i] is read in place.
        inner = torch.nn.functional.linear(x, V.transpose(1, 2).flatten(0, 1))
        inner = inner.unflatten(-1, (groups, rank))
        y = torch.einsum("...gr,gqr->...gq", inner, U).flatten(-2)
        return y if bias is None else y + bias
    inner = torch.einsum("...gp,gpr->...gr", x.unflatten(-1, (groups, -1)), V).flatten(-2)
    return torch.nn.functional.linear(inner, U.movedim(0, 1).flatten(1), bias)
