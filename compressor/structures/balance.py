"""Balanced factors: the same product, its size spread evenly over what is multiplied.

Adam moves every number of a tensor by a like amount, so that a component which is large in one
factor and small in the other would be trained in one of them only. All functions return new
tensors of the same product (up to rounding).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    PivotedSpec,
    Spec,
)

Tensors = dict[str, Tensor]


def balanced(tensors: Tensors, spec: Spec) -> Tensors:
    """`tensors` by the names of `spec`, with even sizes; pivots leave no choice of them."""
    if isinstance(spec, PivotedSpec):
        return tensors
    if isinstance(spec, KroneckerSpec):
        return _chain(tensors)
    if isinstance(spec, BlastSpec):
        return _blast(tensors)
    return _monarch(tensors, spec) if isinstance(spec, MonarchSpec) else _lowrank(tensors)


def _size(tensor: Tensor, *axes: int) -> Tensor:
    """Root mean square over `axes`, which stay as length 1; 1 for what is zero."""
    size = tensor.square().mean(axes, keepdim=True).sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))


def _lowrank(tensors: Tensors) -> Tensors:
    """Every component u vᵀ with |u| = |v|, of groups as well."""
    left, right = (tensors[name].square().sum(-2, keepdim=True).sqrt() for name in "UV")
    scale = _ratio(left, right).sqrt()
    return {"U": tensors["U"] / scale, "V": tensors["V"] * scale}


def _ratio(left: Tensor, right: Tensor) -> Tensor:
    """left / right, 1 where either is zero."""
    good = (left > 0) & (right > 0)
    return torch.where(good, left / torch.where(good, right, 1.0), torch.ones_like(left))


def _monarch(tensors: Tensors, spec: MonarchSpec) -> Tensors:
    """As of low rank, in every block: U[k, :, (l, s)] belongs to V[l, :, (k, s)]."""
    b = spec.blocks
    left = tensors["U"].unflatten(-1, (b, -1))  # [k, q, l, s]
    right = tensors["V"].unflatten(-1, (b, -1)).transpose(0, 2)  # [k, p, l, s]
    found = _lowrank({"U": left.transpose(1, 2), "V": right.transpose(1, 2)})
    U = found["U"].transpose(1, 2).flatten(2)
    V = found["V"].transpose(1, 2).transpose(0, 2).flatten(2)
    return {"U": U.contiguous(), "V": V.contiguous()}


def _blast(tensors: Tensors) -> Tensors:
    """Columns of U_k and V_l of one size, what they differ by in S; then a third of the size of each
    rank in each of the three."""
    U, S, V = (tensors[name] for name in "USV")
    of_u, of_v = _size(U, 1), _size(V, 1)  # [k, 1, r], [l, 1, r]
    U, V = U / of_u, V / of_v
    S = S * of_u * of_v.transpose(0, 1)
    of_s = _size(S, 0, 1)
    third = of_s ** (1 / 3)
    return {"U": U * third, "S": S * (third / of_s), "V": V * third}


def _chain(tensors: Tensors) -> Tensors:
    """Every channel between two factors as large on the one side as on the other."""
    names, found = list(tensors), dict(tensors)
    for outer, inner in pairwise(names):
        left, right = found[outer], found[inner]  # [a, b, c, d] each
        columns = left.square().sum(1).sqrt()  # [a, c, d], flat a channel each
        rows = right.square().sum(2).sqrt()  # [a', b', d']
        scale = _ratio(columns.flatten(), rows.flatten()).sqrt()
        found[outer] = left / scale.view(columns.shape).unsqueeze(1)
        found[inner] = right * scale.view(rows.shape).unsqueeze(2)
    return found


def even_columns(spec: Spec, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same product with columns of U of one size, V taking the rest, for rows that share a scale."""
    if not isinstance(spec, LowRankSpec | MonarchSpec | BlastSpec):
        return factors
    U, V = factors["U"], factors["V"]
    if isinstance(spec, MonarchSpec):  # U [k, q, l·s] belongs to V [l, p, k·s]
        shape = spec.blocks, spec.blocks, spec.block_rank
        size = _size(U, 1).unflatten(-1, shape[1:]).squeeze(1)  # [k, l, s]
        other = size.transpose(0, 1).flatten(1)[:, None]
        return {**factors, "U": U / size.flatten(1)[:, None], "V": V * other}
    if isinstance(spec, BlastSpec):
        size = _size(U.flatten(0, 1), 0)  # [1, r], of all blocks
        return {**factors, "U": U / size, "V": V * size}
    size = _size(U, -2)
    return {**factors, "U": U / size, "V": V * size}
