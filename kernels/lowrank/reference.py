"""Low-rank linear layer in plain torch: ``y = (x V) Uᵀ + bias``."""

from __future__ import annotations

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
