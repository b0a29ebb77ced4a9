"""Monarch in two kernels without a permutation between them (❶–❸).

Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 4 and figure 5.

The middle index of V runs along r' first and the output block k second (❶, our canonical order), so
column c of the product ``x_l V_l`` belongs to output block ``k = c // r'`` and to place
``l·r' + c mod r'`` of that block's input. The first kernel stores it there (❷):

    Z[k, n, l·r' + s] = Σ_p x[n, l·p + ·] V[l, ·, k·r' + s]         runs of r' elements
    y[n, k·q + ·]     = Σ_c Z[k, n, c] U[k, ·, c] + bias            plain batched product

The second stores blocks side by side in the canonical order of outputs; the permutation that the
paper moves into the next weight (❸) does not exist in it.

Both stages are products of `kernels.decode.gemm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from published.parts import product, spans


def staged(
    x: Tensor,
    U: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
) -> Tensor:
    """Monarch linear layer by ❶–❸: one product with a permuted store, one plain product.

    Fastest with V stored [b, r, p] (p contiguous) and with r' a multiple of 8.

    Args:
        x: [n, b·p], U: [b, q, r], V: [b, p, r], any strides; r = b·r', r' first in both.
        bias: [b·q] or None.
        chunk: tokens at a time, default all: the intermediate, b·r·chunk elements, may stay in L2.
        first, second: block sizes of the two stages, of `gemm.launch.bmm` (BM over n).

    Returns:
        [n, b·q] in the dtype of `x`.
    """
    blocks, q, rank = U.shape
    n = x.shape[0]
    y = torch.empty((n, blocks * q), device=x.device, dtype=x.dtype)
    pitch = -(-rank // 16) * 16  # whole vectors a row, whatever the rank
    z = torch.empty((blocks, min(chunk or n, n), pitch), device=x.device, dtype=x.dtype)
    per_block, into = (t.unflatten(1, (blocks, -1)).transpose(0, 1) for t in (x, y))  # [b, n, p or q]
    shift = None if bias is None else bias.unflatten(0, (blocks, q))
    for span in spans(n, chunk):
        middle = z[:, : span.stop - span.start, :rank]
        into_middle = middle.unflatten(2, (blocks, -1)).permute(2, 1, 0, 3)  # [l, n, k, r']
        product(per_block[:, span], V, into_middle, part=rank // blocks, **(first or {}))
        product(middle, U.transpose(1, 2), into[:, span], shift, **(second or {}))
    return y
