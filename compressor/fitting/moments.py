"""Second moments of a group's inputs, and what its layers should compute behind a compressed prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr.compressor.structures.linalg import solve_spd

RIDGE = 0.01  # of the mean diagonal of H in the target: without one, weights grow thirty-fold


@dataclass
class Moments:
    """Sums over tokens, in float64: gram H = Σ x̂ x̂ᵀ [i, i] of the inputs that the compressed
    prefix gives, cross = Σ (x − x̂) x̂ᵀ [i, i] with the dense prefix's inputs x, and drift
    = Σ (h − ĥ) x̂ᵀ [d, i] with the residual streams that the layers' outputs are added to."""

    gram: Tensor | None = None
    cross: Tensor | None = None
    drift: Tensor | None = None

    def add(self, student: Tensor, dense: Tensor | None = None, drift: Tensor | None = None) -> None:
        """Add tokens: `student` x̂ [n, i], `dense` x [n, i], `drift` h − ĥ [n, d], in float32."""
        self.gram = _plus(self.gram, student.mT @ student)
        if dense is not None:
            self.cross = _plus(self.cross, (dense - student).mT @ student)
        if drift is not None:
            self.drift = _plus(self.drift, drift.mT @ student)

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
        assert self.gram is not None
        ridge = RIDGE * self.gram.diagonal().mean()
        identity = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        return weight + solve_spd(self.gram + ridge * identity, right)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part.double() if total is None else total + part.double()
