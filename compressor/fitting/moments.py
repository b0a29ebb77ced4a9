"""Statistics of a layer's inputs, which give the target and the norm of its fit.

Of experts each has the tokens that chose it, and some have hardly any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from blr.compressor.fitting.block_passes import Batch, parted, run_until
from blr.compressor.fitting.experts import STACKS, StackedExperts, seats_of
from blr.compressor.fitting.rounding import Metric
from blr.compressor.structures.linalg import add_ridge, cholesky, solve_factored

RIDGE = 0.01  # added to H, relative to its mean diagonal: without it targets grow thirty-fold
PRIOR = 0.25  # tokens of the layer's mean that an expert's moments get, a number of its input


@dataclass
class Moments:
    """Sums over tokens in float64. gram H = Σ x̂ x̂ᵀ [i, i] is of the inputs x̂ that the compressed
    blocks give; cross = Σ (x − x̂) x̂ᵀ [i, i] also of the dense inputs x; drift = Σ (h − ĥ) x̂ᵀ [d, i]
    of the residual streams h and ĥ that the layers' outputs are added to. tokens: how many chose the
    expert whose inputs these are."""

    gram: Tensor
    cross: Tensor | None = None
    drift: Tensor | None = None
    tokens: int | None = None

    @cached_property
    def metric(self) -> Metric:
        """H scaled to a mean diagonal of 1; all layers of the group share it."""
        return Metric(self.gram / self.gram.diagonal().mean().clamp_min(1e-300))

    def target(self, weight: Tensor) -> Tensor:
        """The weight to fit in place of W [o, i], float64: the T that minimizes Σ ‖T x̂ − W x − (h −
        ĥ)‖² + λ‖T − W‖², which is W + (W cross + drift) (H + λ)⁻¹. Directions that tokens hardly show
        keep W. This is AA-SVD's target (arXiv 2604.02119) with drift and ridge added."""
        if self.cross is None:
            return weight
        right = weight @ self.cross
        if self.drift is not None:
            right = right + self.drift
        return weight + solve_factored(self._ridged, right.mT).mT

    @cached_property
    def _ridged(self) -> Tensor:
        """The lower Cholesky factor of H + λ; all layers of the group share it."""
        return cholesky(add_ridge(self.gram, RIDGE * self.gram.diagonal().mean()))


def products(
    student: Tensor, dense: Tensor | None = None, drift: Tensor | None = None
) -> dict[str, Tensor]:
    """What a batch adds to the moments, from inputs x̂ and x [n, i] and the drift h − ĥ [n, d]."""
    left = {"gram": student, "cross": None if dense is None else dense - student, "drift": drift}
    return {name: rows.mT @ student for name, rows in left.items() if rows is not None}


def routed(
    student: nn.Module, dense: nn.Module, home: str, part: str, batch: Batch, to: torch.device
) -> dict[str, Tensor]:
    """What a batch adds to the moments [E, i, i] of the inputs of a list `part` of layers of the experts
    `home`, and to the numbers of their tokens [E]. The dense experts compute with the tokens that choose
    those of the student."""
    entered, chosen = parted(*run_until(student, batch.student.to(to), batch, home))
    x, _ = parted(*run_until(dense, batch.hidden.to(to), batch, home))
    index = cast(Tensor, chosen[0][0] if chosen[0] else chosen[1]["top_k_index"])
    pair = [cast(StackedExperts, block.get_submodule(home)) for block in (student, dense)]
    seats = seats_of(index, pair[0].count)
    rows = [seats.spread(states.flatten(0, -2)) for states in (entered, x)]
    if part in pair[0].parts.get(STACKS[1], ()):
        rows = [e.stage(STACKS[0], own, seats) for e, own in zip(pair, rows, strict=True)]
    kept, wanted = rows
    found = {"gram": seats.gram(kept, kept), "cross": seats.gram(wanted - kept, kept)}
    return {**found, "tokens": seats.counts}


def expert_moments(sums: Mapping[str, Tensor]) -> list[Moments]:
    """The moments of each expert of a layer, which get the layer's mean as if it were more tokens."""
    counts = sums["tokens"].long().tolist()

    def raised(each: Tensor) -> Tensor:
        return each + PRIOR * each.shape[-1] / max(sum(counts), 1) * each.sum(0)

    pairs = zip(raised(sums["gram"]), raised(sums["cross"]), counts, strict=True)
    return [Moments(gram, cross, tokens=count) for gram, cross, count in pairs]
