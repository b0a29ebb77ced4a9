"""Computes what rounding errors in V cost where U is fitted afterwards: the part that no U makes good.

Of ``W_k = U_k Z_kᵀ`` an error δ in Z_k is made good as far as it lies in the span of Z_k, in the metric
of the inputs. To first order the rest costs ``U_k δᵀ (H − H Z_k (Z_kᵀ H Z_k)⁻¹ Z_kᵀ H) δ U_kᵀ``.
"""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from blr.compressor.structures.linalg import solve_spd
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.spec import Spec

NOTHING = 1e-5  # of the mean diagonal: what float32 leaves of a difference that is none


def seen_by_v(spec: Spec, factors: Mapping[str, Tensor], gram: Tensor | None) -> Tensor | None:
    """The metric of errors in the columns of a packed V. For low rank V [r, i] it is [i, i]; for Monarch
    [l, k·r', p] it is [l, k, p, p]; for BLAST [l, r, p] it is [l, p, p], a mean over block rows by their
    share. None where a structure has no such V.

    Args:
        factors: canonical. gram: [i, i] of the layer's inputs, None for white ones.
    """
    if spec.structure not in ("svd", "monarch", "blast") or getattr(spec, "groups", 1) > 1:
        return None
    right = STRUCTURES[spec.structure].factorizer().right_factor(dict(factors), spec)  # [..., i, K]
    whole = torch.eye(spec.in_features).to(right) if gram is None else gram.to(right)
    if spec.structure == "svd":
        return _left(whole, right, 1)[0]
    if spec.structure == "monarch":
        return torch.stack([_left(whole, Z, len(right)) for Z in right], 1)
    used = factors["U"].square().sum(1)[:, None] * factors["S"].square()  # [k, l, r]
    shares = used.mean(-1)[..., None, None]
    parts = (s * _left(whole, Z, len(right)) for s, Z in zip(shares, right, strict=True))
    return reduce(torch.add, parts)


def _left(gram: Tensor, Z: Tensor, blocks: int) -> Tensor:
    """The diagonal blocks [b, p, p] of ``H − H Z (Zᵀ H Z)⁻¹ Zᵀ H``. Where next to nothing but rounding
    is left, as where Z has the rank of its inputs, those of H."""
    weighted = gram @ Z
    solved = solve_spd(Z.mT @ weighted, weighted)
    own = gram.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))
    parts = zip(weighted.chunk(blocks), solved.chunk(blocks), strict=True)
    found = []
    for n, (left, right) in enumerate(parts):
        whole, rest = own[n, :, n], own[n, :, n] - right @ left.mT
        some = rest.diagonal().mean() > NOTHING * whole.diagonal().mean()
        found.append(torch.where(some, (rest + rest.mT) / 2, whole))
    return torch.stack(found)
