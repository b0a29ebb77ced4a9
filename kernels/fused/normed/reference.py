"""Layer normalization in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x − mean) / √(var + eps) ⊙ weight + bias`` over the last axis of x [..., K]."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
