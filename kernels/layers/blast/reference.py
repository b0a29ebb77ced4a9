"""BLAST linear layer in plain torch: shared input factors, a diagonal mix, shared output factors."""

import torch
from torch import Tensor


def blast_linear(x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y_k = U_k Σ_l S_kl ⊙ (V_lᵀ x_l)`` over b×b blocks.

    The mix over l is a batch of b×b products, one for each of the r ranks: it never forms the
    [n, b, b, r] tensor that broadcasting would.
    Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2.

    Args:
        x: [..., i] with i = b·p, any float dtype, contiguous or not.
        U: [b, q, r], S: [b, b, r] indexed (k, l, r), V: [b, p, r].
        bias: [b·q] or None.

    Returns:
        [..., b·q] in the dtype of `x`.
    """
    blocks = V.shape[0]
    batch = x.shape[:-1]
    x = x.reshape(-1, blocks, x.shape[-1] // blocks).transpose(0, 1)  # [b, n, p]
    z = (x @ V).permute(2, 1, 0)  # [r, n, l]
    z = torch.bmm(z, S.permute(2, 1, 0))  # [r, n, k]
    y = z.permute(2, 1, 0) @ U.transpose(1, 2)  # [k, n, q]
    y = y.transpose(0, 1).reshape(*batch, U.shape[0] * U.shape[1])
    return y if bias is None else y + bias
