"""The options of factorizers, and the errors that they are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from blr.compressor.base.processes import Processes

SPREAD_BYTES = 1 << 33  # memory that BLAST's fit may take for the products V_lᵀ H_l of all block rows


@dataclass(frozen=True)
class FitOptions:
    """How to fit a layer.

    solver: one of the structure's solvers; None: its default. rounds: alternations, or steps of a
    gradient solver; None: the solver's default. seed: of solvers that start from random numbers.
    processes: those that fit this layer together, with the same calls; None: this one alone. noise: the
    relative variance that rounding will give each term of a product, 0 for none.
    """

    solver: str | None = None
    rounds: int | None = None
    seed: int = 0
    processes: Processes | None = None
    noise: float = 0.0


def weighted_norm_squared(matrix: Tensor, gram: Tensor | None = None) -> float:
    """tr(M H Mᵀ) of `matrix` [o, i] with `gram` H [i, i]; the squared Frobenius norm if H is None. With
    M = W − W' this is the squared error of the layer's output over the calibration inputs (H = Σ x
    xᵀ)."""
    weighted = matrix if gram is None else matrix @ gram
    return float((weighted * matrix).sum())


def relative_error(weight: Tensor, approximation: Tensor, gram: Tensor | None = None) -> float:
    """‖W − W'‖ / ‖W‖ in the norm of `gram` (Frobenius if None); of a zero weight 0 if met
    exactly, else 1."""
    total = weighted_norm_squared(weight, gram)
    missed = max(weighted_norm_squared(weight - approximation, gram), 0.0)
    if total <= 0.0:
        return 0.0 if missed == 0.0 else 1.0
    return (missed / total) ** 0.5
