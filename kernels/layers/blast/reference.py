"""BLAST linear layer in plain torch: shared input factors, a diagonal mix, shared output factors."""

import torch
from torch import Tensor

FEW = 12  # tokens up to which they are mixed one by one
TOKENS = 128  # at a time: z of 16 blocks of rank 256 is 2 MB


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


def cpu_linear(x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same on a CPU, for x [n, i] (`scripts/log`): features come first, so that rows of the mix are
    long; few tokens are mixed one by one, as fast as S is read."""
    y = (_few if x.shape[0] <= FEW else _many)(x, U, S, V)
    return y if bias is None else y.add_(bias)


def _few(x: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    blocks, width, _ = V.shape
    z = torch.bmm(x.reshape(-1, blocks, width).transpose(0, 1), V)  # [l, n, r]
    mixed = [(S * token).sum(1) for token in z.unbind(1)]  # n of [k, r]
    y = torch.bmm(torch.stack(mixed, 1), U.mT)  # [k, n, q]
    return y.transpose(0, 1).flatten(1)


def _many(x: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], U.shape[0] * U.shape[1])
    mix = S.permute(2, 0, 1).contiguous()  # [r, k, l]
    for rows, out in zip(x.split(TOKENS), y.split(TOKENS), strict=True):
        out.copy_(_features_first(rows, U, mix, V).t())
    return y


def _features_first(x: Tensor, U: Tensor, mix: Tensor, V: Tensor) -> Tensor:
    """[o, n] of x [n, i]."""
    blocks, width, _ = V.shape
    z = torch.bmm(V.mT, x.reshape(-1, blocks, width).permute(1, 2, 0))  # [l, r, n]
    w = torch.bmm(mix, z.transpose(0, 1))  # [r, k, n]
    return torch.bmm(U, w.transpose(0, 1)).flatten(0, 1)
