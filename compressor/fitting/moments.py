"""Second moments of a group's inputs, and what its layers should compute behind a compressed prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blr.compressor.base.processes import OrderedSum, Processes
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


@dataclass(frozen=True)
class Inputs:
    """Of one batch: `student` x̂ [n, i], `dense` x [n, i], `drift` h − ĥ [n, d], in float32."""

    student: Tensor
    dense: Tensor | None = None
    drift: Tensor | None = None

    def products(self) -> list[Tensor]:
        """What the batch adds to the moments, in their order."""
        left = [self.student]
        if self.dense is not None:
            left.append(self.dense - self.student)
        if self.drift is not None:
            left.append(self.drift)
        return [rows.mT @ self.student for rows in left]


class MomentSums:
    """Adds batches that are dealt out to processes, a round at a time; `kinds` counts the moments."""

    def __init__(self, processes: Processes, batches: int, kinds: int) -> None:
        self.sums = [OrderedSum(processes, batches, torch.float64) for _ in range(kinds)]

    def add(self, inputs: Inputs | None) -> None:
        """This process's next batch, None if it has no more."""
        parts = [None] * len(self.sums) if inputs is None else inputs.products()
        for total, part in zip(self.sums, parts, strict=True):
            total.add(part)

    def moments(self) -> Moments:
        """In every process."""
        return Moments(*(total.total() for total in self.sums))
