"""Changes factors but not their product (up to rounding): to even sizes, or with mixed ranks."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from blr.compressor.structures.linalg import orthonormal
from blr.compressor.structures.monarch import gather, scatter
from blr.compressor.structures.spec import Spec

Tensors = dict[str, Tensor]


def balanced(tensors: Tensors, spec: Spec) -> Tensors:
    """Factors of the same product with even sizes: Adam moves all numbers by a like amount, and would
    train a component in one factor only that is large there and small in the other."""
    known = {"svd": _lowrank, "monarch": _monarch, "blast": _blast, "ks": _chain}
    return known[spec.structure](tensors) if spec.structure in known else tensors


def _size(tensor: Tensor, *axes: int) -> Tensor:
    """Root mean square over `axes`, which keep length 1; 1 for zeros."""
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


def _monarch(tensors: Tensors) -> Tensors:
    """Every component of every block as of low rank: U[k, :, (l, s)] belongs to V[l, :, (k, s)]."""
    left, right = (scatter(tensors[name], len(tensors["U"])) for name in "UV")
    found = _lowrank({"U": left, "V": right.transpose(0, 1)})  # [k, l, ·, s]
    U, V = gather(found["U"]), gather(found["V"].transpose(0, 1))
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


def even_columns(spec: Spec, factors: Tensors) -> Tensors:
    """Factors of the same product in which all columns of U have one size, for rows that share a
    scale."""
    if spec.structure not in ("svd", "monarch", "blast"):
        return factors
    U, V = factors["U"], factors["V"]
    size = other = _size(U, -2)
    if spec.structure == "monarch":  # U [k, q, l·s] belongs to V [l, p, k·s]
        size = _size(U, 1)
        other = size.unflatten(-1, (len(U), -1)).squeeze(1).transpose(0, 1).flatten(1)[:, None]
    elif spec.structure == "blast":
        size = other = _size(U.flatten(0, 1), 0)  # [1, r], of all blocks
    return {**factors, "U": U / size, "V": V * other}


def turned(spec: Spec, factors: Mapping[str, Tensor]) -> Tensors:
    """Factors of the same product with the ranks of U and V mixed by a random rotation, one for all
    blocks of Monarch. Factors stay as they are in structures with couplings between ranks, or without
    ranks.

    Where z = Vᵀx is rounded to floating point, every z_j errs by a share ε of its own size: the output
    by ε² Σ_j ‖u_j‖² E z_j². With the principal directions of fits that is ε² E‖y‖². A random rotation
    makes all ‖u_j‖ and all E z_j² about alike: ε² (Σ_j ‖u_j‖²) (Σ_j E z_j²) / r, which is less for
    factors of balanced sizes.
    """
    if spec.structure not in ("svd", "monarch"):
        return dict(factors)
    rank = factors["U"].shape[-1] // (len(factors["U"]) if spec.structure == "monarch" else 1)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    turn = orthonormal(random).to(factors["U"])
    return {name: (t.unflatten(-1, (-1, rank)) @ turn).flatten(-2) for name, t in factors.items()}
