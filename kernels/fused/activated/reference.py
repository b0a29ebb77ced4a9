"""A product with bias and activation in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.decode.gemv.segments import ACTIVATIONS


def activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``φ(x weightᵀ + bias)`` of x [..., k], weight [m, k], bias [m] or None: [..., m]."""
    return ACTIVATIONS[activation](linear(x, weight, bias))
