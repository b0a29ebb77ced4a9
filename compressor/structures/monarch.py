"""Monarch factorization: every block its own low rank.

Without statistics each block (k, l) is approximated by its truncated SVD, which is optimal.
Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2; the
projection is that of Monarch (Dao et al., arXiv 2204.00595, section 3).
"""

from __future__ import annotations

from torch import Tensor

from blr.compressor.structures.base import Fit, FitOptions
from blr.compressor.structures.linalg import truncated_svd
from blr.compressor.structures.specs import MonarchSpec

SOLVERS = ("svd",)


def fit(
    weight: Tensor,
    spec: MonarchSpec,
    gram: Tensor | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """U [b, q, b·r'] and V [b, p, b·r'] for `weight` [o, i], by block SVD."""
    left, right = truncated_svd(_blocks(weight, spec.blocks), spec.block_rank)
    return Fit({"U": _gather(left), "V": _gather(right.transpose(0, 1))})


def reconstruct(tensors: dict[str, Tensor], spec: MonarchSpec) -> Tensor:
    """The dense weight [o, i]."""
    b = spec.blocks
    left = tensors["U"].unflatten(-1, (b, spec.block_rank)).permute(0, 2, 1, 3)  # [k, l, q, r']
    right = tensors["V"].unflatten(-1, (b, spec.block_rank)).permute(2, 0, 1, 3)  # [k, l, p, r']
    return (left @ right.mT).permute(0, 2, 1, 3).reshape(spec.out_features, spec.in_features)


def _blocks(weight: Tensor, b: int) -> Tensor:
    """[o, i] -> [k, l, q, p]."""
    o, i = weight.shape
    return weight.reshape(b, o // b, b, i // b).permute(0, 2, 1, 3)


def _gather(factors: Tensor) -> Tensor:
    """[k, l, m, r'] -> [k, m, l·r'], the stored order of the middle index."""
    return factors.permute(0, 2, 1, 3).flatten(2)
