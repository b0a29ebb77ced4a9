"""Ranks mixed so that rounding what lies between two factors loses less of the product.

Where z = Vᵀx is rounded to floating point, every z_j errs by a share ε of its own size: the output by
ε² Σ_j ‖u_j‖² E z_j². Fits give principal directions, with which that is ε² E‖y‖², as if the output
itself were rounded. ``U R`` and ``V R`` have the same product for any rotation R, and a random one
makes all ‖u_j‖ and all E z_j² about alike: ε² (Σ_j ‖u_j‖²) (Σ_j E z_j²) / r, which is less for factors
whose sizes are balanced, as fits leave them. The least of all mixtures, ε² (Σ_j σ_j)² / r with σ the
singular values of U (E z zᵀ)^½, has sizes by the inputs' moments; models gained nothing by that
(scripts/log).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr.compressor.structures.linalg import orthonormal
from blr.compressor.structures.specs import LowRankSpec, MonarchSpec, Spec


def turned(spec: Spec, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical factors with the ranks of U and V rotated, those of every block of Monarch alike; as
    they are where a structure has couplings between ranks, or none."""
    if not isinstance(spec, LowRankSpec | MonarchSpec):
        return dict(factors)
    rank = spec.block_rank if isinstance(spec, MonarchSpec) else spec.rank
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    turn = orthonormal(random).to(factors["U"])
    return {name: (t.unflatten(-1, (-1, rank)) @ turn).flatten(-2) for name, t in factors.items()}
