"""Ranks from a parameter budget.

`svd` and Monarch spend r(i + o) parameters on an o×i layer and BLAST r(i + o + b²), so a
compression factor cf asks for r = io / (cf·(i + o [+ b²])). Ranks are rounded to multiples that
kernels like and then nudged, the same for all layers of one shape, until the whole model meets
the factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

Shape = tuple[int, int]  # (out_features, in_features)


def fit_ranks(
    shapes: list[Shape], cf: float, cost: Callable[[Shape], int], step: Callable[[Shape], int]
) -> dict[Shape, int]:
    """One rank a shape, so that the parameters of all layers come closest to Σ io / cf.

    Args:
        shapes: (o, i) of every layer, repeated as often as it occurs.
        cf: dense over structured parameters.
        cost: parameters one unit of rank costs in a layer of that shape.
        step: the rank must be a multiple of this in a layer of that shape (b for Monarch).

    Returns:
        Rank by shape; 0 where not even one step fits the budget.
    """
    counts = Counter(shapes)
    exact = {shape: prod(shape) / (cf * cost(shape)) for shape in counts}
    units = {shape: _unit(exact[shape], step(shape)) for shape in counts}
    ranks = {shape: units[shape] * round(exact[shape] / units[shape]) for shape in counts}
    budget = sum(prod(shape) * n for shape, n in counts.items()) / cf
    _nudge(ranks, units, {s: cost(s) * n for s, n in counts.items()}, budget)
    return ranks


def _unit(rank: float, step: int) -> int:
    """The largest of 16, 8, 4, 2, 1 times `step` that moves `rank` by under 2%, or `step`."""
    return next((m * step for m in (16, 8, 4, 2) if m * step * 25 <= rank), step)


def _nudge(
    ranks: dict[Shape, int], units: dict[Shape, int], weight: dict[Shape, int], budget: float
) -> None:
    """Change one shape's rank by one unit while that brings the total closer to `budget`."""
    for _ in range(64):
        surplus = sum(rank * weight[shape] for shape, rank in ranks.items()) - budget
        moves = [(s, d * units[s]) for s in ranks for d in (-1, 1) if ranks[s] + d * units[s] > 0]
        best = min(moves, key=lambda m: abs(surplus + m[1] * weight[m[0]]), default=None)
        if best is None or abs(surplus + best[1] * weight[best[0]]) >= abs(surplus):
            return
        ranks[best[0]] += best[1]
