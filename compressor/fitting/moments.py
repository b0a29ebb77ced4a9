"""Second moments of a group's inputs, and what its layers should compute behind a compressed prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blr.compressor.fitting.rounding import Metric
from blr.compressor.structures.linalg import cholesky, solve_factored

RIDGE = 0.01  # of the mean diagonal of H in the target: without one, weights grow thirty-fold


@dataclass
class Moments:
    """Sums over tokens, in float64: gram H = Σ x̂ x̂ᵀ [i, i] of the inputs that the compressed
    prefix gives, cross = Σ (x − x̂) x̂ᵀ [i, i] with the dense prefix's inputs x, and drift
    = Σ (h − ĥ) x̂ᵀ [d, i] with the residual streams that the layers' outputs are added to."""

    gram: Tensor
    cross: Tensor | None = None
    drift: Tensor | None = None

    @cached_property
    def metric(self) -> Metric:
        """H with a mean diagonal of 1, which all layers of the group share."""
        return Metric(self.gram / self.gram.diagonal().mean().clamp_min(1e-300))

    def target(self, weight: Tensor, *, correct_drift: bool) -> Tensor:
        """argmin_T Σ ‖T x̂ − W x − (h − ĥ)‖² + λ‖T − W‖² for W [o, i] in float64:
        W + (W cross + drift) (H + λ)⁻¹.

        Directions that tokens hardly show keep W. Source: AA-SVD (arXiv 2604.02119), with the drift
        of the residual stream and the ridge added.
        """
        if self.cross is None:
            return weight
        right = weight @ self.cross
        if correct_drift and self.drift is not None:
            right = right + self.drift
        return weight + solve_factored(self._ridged, right.mT).mT

    @cached_property
    def _ridged(self) -> Tensor:
        """Lower Cholesky factor of H + λ, the same for all layers of the group."""
        ridge = RIDGE * self.gram.diagonal().mean()
        identity = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        return cholesky(self.gram + ridge * identity)


def products(
    student: Tensor, dense: Tensor | None = None, drift: Tensor | None = None
) -> dict[str, Tensor]:
    """What one batch adds to the moments, by their names: of its inputs `student` x̂ [n, i] and `dense`
    x [n, i], and its `drift` h − ĥ [n, d], in float32."""
    left = {"gram": student, "cross": None if dense is None else dense - student, "drift": drift}
    return {name: rows.mT @ student for name, rows in left.items() if rows is not None}
