"""Ranks mixed so that rounding what lies between two factors loses least of the product.

Where z = Vᵀx is rounded to floating point, every z_j errs by a share ε of its own size, and so does each
number of U: the output by ε² Σ_j ‖u_j‖² E z_j². Fits give principal directions, with which that is
ε² E‖y‖², as if the output itself were rounded. ``U G⁻¹`` and ``G z`` have the same product, and by
Cauchy-Schwarz no G comes below ε² (Σ_j σ_j)² / r, σ the singular values of U (E z zᵀ)^½. That is met
where all ‖u_j‖² E z_j² are one: half of every σ on either side, then a rotation that spreads them over
all ranks. Of the two the rotation is what counts where a fit has balanced its factors (scripts/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.structures.linalg import cholesky, orthonormal, solve_upper, truncated_svd


def spread(
    left: Tensor, right: Tensor, gram: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Factors [..., m, r] and [..., n, r] of the same ``left @ right.mT``, in their dtypes.

    Args:
        gram: [..., n, n] of what `right` multiplies, None for inputs that are white.
    """
    wide, pair = right.double(), left.double()
    seen = wide if gram is None else gram.double() @ wide
    of_left, of_z = cholesky(pair.mT @ pair).mT, cholesky(wide.mT @ seen)
    rank = left.shape[-1]
    outer, inner = truncated_svd(of_left @ of_z, rank)  # P Σ^½, Q Σ^½
    generator = torch.Generator().manual_seed(seed)
    turn = orthonormal(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).to(wide)
    new_left = pair @ (solve_upper(of_left, outer) @ turn)
    new_right = wide @ (solve_upper(of_z.mT, inner) @ turn)
    return new_left.to(left), new_right.to(right)
