"""BLAST linear layer on a CPU, in plain torch, ordered by the number of tokens (`scripts/log`).

Features come first, so that rows of the mix are long; few tokens are mixed one by one, as fast as S is
read.
"""

import torch
from torch import Tensor

FEW = 12  # tokens up to which they are mixed one by one
TOKENS = 128  # at a time: z of 16 blocks of rank 256 is 2 MB


def blast_linear(x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference, for x [n, i]."""
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
