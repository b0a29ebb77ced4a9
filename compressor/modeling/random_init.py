"""Random first values of factors. Shipped in every checkpoint."""

from __future__ import annotations

import torch
from torch import nn

Shape = tuple[int, ...]


def spread(name: str, shape: Shape) -> float:
    """The standard deviation that gives the factor `name` of a structure unit gain: one over the root of
    how many numbers are summed, those of U's last axis, of BLAST's blocks over which its couplings sum,
    and of the last axis but one of V and of Kronecker-sparse factors."""
    summed = shape[-1] if name == "U" else shape[0] if name == "S" else shape[-2]
    return max(summed, 1) ** -0.5


def drawn(name: str, shape: Shape) -> nn.Parameter:
    """The factor `name`, for training from scratch; empty on the meta device."""
    values = torch.empty(shape)
    return nn.Parameter(values if values.is_meta else values.normal_() * spread(name, shape))
