"""Statistics of a layer's inputs, which give the target and the norm of its fit.

Of experts each has the tokens that chose it, and some have hardly any.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from blr.compressor.fitting.block_passes import (
    Arguments,
    Batch,
    Reached,
    captured_inputs,
    parted,
    run_block,
)
from blr.compressor.fitting.rounding import Metric
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.structures.linalg import add_ridge, cholesky, solve_factored

RIDGE = 0.01  # added to H, relative to its mean diagonal: without it targets grow thirty-fold
PRIOR = 0.25  # tokens of the layer's mean that an expert's moments get, a number of its input
FLOOR = 0.05  # share of the layer's mean that an expert's sensitivities get
Sums = dict[tuple[str, str], Tensor]  # by kind and layer


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
    student: nn.Module, dense: nn.Module, heads: Sequence[str], batch: Batch, to: torch.device
) -> Sums:
    """What a batch adds to the moments of the inputs of the layers `heads` of experts, and to the number
    of their tokens. The dense experts compute with the tokens that choose those of the student."""
    home, part, _ = heads[0].rsplit(".", 2)
    entered, chosen = _entering(student, home, batch.student.to(to), batch)
    x, _ = _entering(dense, home, batch.hidden.to(to), batch)
    experts = cast(Experts, student.get_submodule(home))
    if part in experts.parts.get("gate_up_proj", ()):
        kept, wanted = (_routed_rows(states, chosen, heads) for states in (entered, x))
    else:
        with captured_inputs(student, heads) as kept, captured_inputs(dense, heads) as wanted:
            experts(entered, *chosen[0], **chosen[1])
            dense.get_submodule(home)(x, *chosen[0], **chosen[1])
    found = Sums()
    for name in heads:
        rows = kept.get(name)
        found["tokens", name] = torch.full((1,), 0.0 if rows is None else len(rows), device=to)
        if rows is None:
            found["gram", name] = found["cross", name] = gram_of(kept, name, student, batch)
        else:
            found |= {(kind, name): t for kind, t in products(rows, wanted[name]).items()}
    return found


def _routed_rows(states: Tensor, chosen: Arguments, heads: Sequence[str]) -> dict[str, Tensor]:
    """The states of the tokens that chose each expert, without running any."""
    index = cast(Tensor, chosen[0][0] if chosen[0] else chosen[1]["top_k_index"])
    pairs, rows = index.flatten(), states.flatten(0, -2)
    each = pairs.argsort(stable=True).split(pairs.bincount(minlength=len(heads)).tolist())
    found = zip(heads, each, strict=True)
    return {name: rows[own // index.shape[-1]] for name, own in found if len(own)}


def _entering(block: nn.Module, name: str, hidden: Tensor, batch: Batch) -> tuple[Tensor, Arguments]:
    """What the module `name` is called with when the block runs, which then ends."""
    kept: list[tuple[Tensor, Arguments]] = []

    def keep(module: nn.Module, positional: tuple[object, ...], named: dict[str, object]) -> None:
        kept.append(parted(positional, named))
        raise Reached

    handle = block.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with suppress(Reached):
            run_block(block, hidden, batch)
    finally:
        handle.remove()
    return kept[0]


def gram_of(kept: Mapping[str, Tensor], name: str, block: nn.Module, batch: Batch) -> Tensor:
    """Σ x xᵀ of the inputs of a layer that were kept; zeros for an expert that no token chose."""
    if name in kept:
        return products(batch.rows(kept[name]))["gram"]
    layer: Any = block.get_submodule(name)
    width = getattr(layer, "base", layer).in_features
    return next(layer.parameters()).new_zeros(width, width)


def expert_moments(sums: Sums, heads: Sequence[str]) -> list[Moments]:
    """The moments of each expert of a layer, which get the layer's mean as if it were more tokens."""
    counts = [int(sums["tokens", name]) for name in heads]
    for kind in ("gram", "cross"):
        each = [sums[kind, name] for name in heads]
        mean = torch.zeros_like(each[0])
        for one in each:
            mean += one / max(sum(counts), 1)
        for one in each:
            one.add_(mean, alpha=PRIOR * len(one))
    found = [(sums["gram", name], sums["cross", name]) for name in heads]
    return [Moments(*pair, tokens=count) for pair, count in zip(found, counts, strict=True)]


def with_floor(sums: Sequence[Tensor]) -> list[Tensor]:
    """The sums of each expert of a layer with a small share of their mean added."""
    mean = torch.zeros_like(sums[0])
    for each in sums:
        mean += each
    return [each + FLOOR / len(sums) * mean for each in sums]
