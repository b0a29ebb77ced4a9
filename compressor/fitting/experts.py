"""The experts of a mixture as fits and training run them: some at once, by their dense weights.

An expert's rows are the tokens that chose it, and zeros up to the most of those beside it: a pass has
some dozens of launches, whatever the number of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.fitting.composed import dense_weight
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.structures.latent import Trained, joined

AT_ONCE = 8  # experts that have equally many rows
STACKS = "gate_up_proj", "down_proj"  # transformers' names, in the order of computing


@dataclass(frozen=True)
class Seats:
    """The rows [P, d] of E experts. chosen: the experts of each token [n, k]. at: their rows [n, k] for
    it. counts: tokens [E] of each. heights: rows of each, equal for `AT_ONCE` neighbours."""

    chosen: Tensor
    at: Tensor
    counts: Tensor
    heights: list[int]

    def spread(self, x: Tensor) -> Tensor:
        """Rows [P, d] of tokens [n, d]."""
        return self._seated(x[:, None].expand(-1, self.at.shape[1], -1).flatten(0, 1))

    def collected(self, rows: Tensor) -> Tensor:
        """What rows [P, d] are for each token's choice [n, k, d]."""
        return rows.index_select(0, self.at.flatten()).unflatten(0, self.at.shape)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Rows [P, d] as those of `AT_ONCE` experts each, [e, height, d]."""
        each = [self.heights[n : n + AT_ONCE] for n in range(0, len(self.heights), AT_ONCE)]
        split = zip(rows.split([sum(heights) for heights in each]), each, strict=True)
        return [part.view(len(heights), heights[0], rows.shape[1]) for part, heights in split]

    def of_experts(self, each: Tensor) -> Tensor:
        """Rows [P, d] that are those of their experts in `each` [E, d]; zeros where no token is."""
        return self._seated(each[self.chosen.flatten()])

    def _seated(self, values: Tensor) -> Tensor:
        """Rows [P, d] of values [n k, d] of each token's choices."""
        return values.new_zeros(sum(self.heights), values.shape[1]).index_copy(
            0, self.at.flatten(), values
        )

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Rows [P, o] of rows [P, i] by the weights [E, o, i] of their experts."""
        pairs = zip(self.parts(rows), weight.split(AT_ONCE), strict=True)
        return torch.cat([torch.bmm(part, own.mT).flatten(0, 1) for part, own in pairs])

    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ l rᵀ [E, m, n] over each expert's rows l of [P, m] and r of [P, n]."""
        pairs = zip(self.parts(left), self.parts(right), strict=True)
        return torch.cat([torch.bmm(one.mT, other) for one, other in pairs])


Kept = dict[tuple[str, str], tuple[Seats, Tensor]]


def seats_of(chosen: Tensor, count: int) -> Seats:
    """The seats of tokens that chose `chosen` [n, k] of `count` experts."""
    flat = chosen.flatten()
    counts = flat.bincount(minlength=count)
    known = counts.tolist()
    most = [max(known[n : n + AT_ONCE]) for n in range(0, count, AT_ONCE)]
    heights = [most[n // AT_ONCE] for n in range(count)]
    starts = torch.tensor([0, *accumulate(heights[:-1])], device=flat.device)
    order = flat.argsort(stable=True)
    shift = starts - counts.cumsum(0) + counts
    places = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
    at = torch.empty_like(places).index_copy(0, order, places)
    return Seats(chosen, at.view_as(chosen), counts, heights)


class StackedExperts(Experts):
    """Experts that compute by the weights [E, o, i] of all. joined: layers that are trained as one, with
    their numbers, by the name of their list. watch: called with a list's name, "in" or "out", the seats
    and the rows [P, d] that enter or leave its layers; None calls nothing."""

    def __init__(self, native: Any, parts: dict[str, list[str]]) -> None:
        super().__init__(native, parts)
        self.joined: dict[str, list[tuple[list[int], Joined]]] = {}
        self.watch: Callable[[str, str, Seats, Tensor], None] | None = None

    def weight(self, name: str) -> Tensor:
        """The weights [E, o, i] of a list of layers; differentiable."""
        groups = self.joined.get(name, [])
        if [n for numbers, _ in groups for n in numbers] == [*range(self.count)]:
            return torch.cat([one.weight() for _, one in groups])
        found = {n: w for ns, one in groups for n, w in zip(ns, one.weight().unbind(), strict=True)}
        layers = enumerate(getattr(self, name))
        return torch.stack([found[n] if n in found else dense_weight(layer) for n, layer in layers])

    def stage(self, stack: str, rows: Tensor, seats: Seats) -> Tensor:
        """What experts make of rows [P, i] by their layers in a stack, or by their weights in it."""
        if names := self.parts.get(stack):
            each = {name: seats.product(rows, self.weight(name)) for name in names}
            if self.watch is not None:
                self.watch(names[0], "in", seats, rows)
                for name, y in each.items():
                    self.watch(name, "out", seats, y)
            y = torch.cat([*each.values()], -1)
        else:
            weight = getattr(self, stack)
            y = seats.product(rows, weight.mT if self.is_transposed else weight)
        if self.has_bias:
            y = y + seats.of_experts(getattr(self, f"{stack}_bias"))
        return self.native._apply_gate(self, y) if stack == STACKS[0] else y

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the chosen experts make of each token of [..., d]: their weighted sum."""
        seats = seats_of(top_k_index, self.count)
        rows = seats.spread(hidden_states.flatten(0, -2))
        for stack in STACKS:
            rows = self.stage(stack, rows, seats)
        y = (seats.collected(rows) * top_k_weights[..., None]).sum(1)
        return y.to(hidden_states.dtype).view_as(hidden_states)


class Joined:
    """Layers of one spec as one. parts: what is trained in place of theirs, [n, ...]."""

    def __init__(self, members: Sequence[Mapping[str, Trained]]) -> None:
        self.parts = {name: joined([member[name] for member in members]) for name in members[0]}

    def weight(self) -> Tensor:
        """Their weights [n, o, i]; differentiable."""
        held = {name.rpartition(".")[2]: part.parameter for name, part in self.parts.items()}
        if "U" not in held:
            return held["weight"]
        if "weight" not in held:
            return held["U"] @ held["V"].mT
        return torch.baddbmm(held["weight"], held["U"], held["V"].mT)


def kind_of(parts: Mapping[str, Trained]) -> tuple[object, ...] | None:
    """What layers of one spec must have in common to be `Joined`; None for those that cannot be: sums of
    a dense weight and low rank can, and either alone."""
    leaves = [name.rpartition(".")[2] for name in parts]
    matrices = all(part.parameter.dim() == 2 for part in parts.values())
    if not matrices or sorted({*leaves} & {"weight", "U", "V"}) != sorted(leaves):
        return None
    return tuple(getattr(part, "grid", None) for part in parts.values())


def experts_of(block: nn.Module) -> dict[str, StackedExperts]:
    """The experts of a block, by name."""
    return {name: part for name, part in block.named_modules() if isinstance(part, StackedExperts)}


@contextmanager
def watched_experts(block: nn.Module) -> Iterator[Kept]:
    """While active, the rows that enter ("in") and leave ("out") the experts of `block` are kept, by the
    name of their list. Of lists that read the same the first has what enters."""
    kept, found = Kept(), experts_of(block)

    def keep(home: str, part: str, side: str, seats: Seats, rows: Tensor) -> None:
        kept[f"{home}.{part}", side] = seats, rows

    for home, experts in found.items():
        experts.watch = partial(keep, home)
    try:
        yield kept
    finally:
        for experts in found.values():
            experts.watch = None
