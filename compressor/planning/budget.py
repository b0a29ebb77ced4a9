"""Finds ranks that meet a parameter budget, without torch: uniform ones, or blended with those at which
one more parameter saves equally much predicted loss in every layer. A layer's `curve` is what each
further rank saves: the falling eigenvalues of G^½ W H Wᵀ G^½, where G is the Fisher matrix of its output
and H the Gram matrix of its input."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

TOLERANCE = 0.01  # by which rounded ranks may miss the budget, relative to it
ALMOST_FULL = 0.97  # most that sensitivities ask for, relative to the break-even rank


@dataclass(frozen=True)
class Item:
    """`count` layers of equal `size` that share a rank, a multiple of `step`, whose unit takes `cost`
    parameters. `curve` is the predicted loss that each further rank saves; a unit is worth `width`."""

    size: int
    cost: int
    step: int = 1
    count: int = 1
    curve: Sequence[float] | None = None
    width: int = 1

    @property
    def price(self) -> int:
        """The parameters of one more unit of rank in all layers."""
        return self.cost * self.count

    def rank_of(self, parameters: float) -> float:
        """The rank at which one layer has so many parameters."""
        return parameters / self.cost

    @property
    def full(self) -> float:
        """The break-even rank, with as many parameters as the dense layer."""
        return self.rank_of(self.size)

    @property
    def most(self) -> int:
        """The largest possible rank up to `full`."""
        return max(int(self.full // self.step), 1) * self.step

    @property
    def least(self) -> int:
        """The parameters of all layers at the smallest possible rank."""
        return self.step * self.price


def exact_ranks(
    items: Sequence[Item], budget: float, *, strength: float = 0.0, floor: float = 0.0
) -> list[float]:
    """Real-valued ranks that spend `budget` exactly, each between one step and break-even. `strength`
    is the weight of the sensitivities; they leave a layer at least `floor` of its uniform rank."""
    share = budget / sum(item.size * item.count for item in items)
    wanted = [item.rank_of(share * item.size) for item in items]
    if strength and any(item.curve is not None for item in items):
        greedy = equal_margins(items, budget, floor)
        wanted = [(1 - strength) * w + strength * g for w, g in zip(wanted, greedy, strict=True)]
    return _scaled(items, wanted, budget)


def equal_margins(items: Sequence[Item], budget: float, floor: float) -> list[float]:
    """Ranks at which one more parameter saves the same predicted loss everywhere, from `floor` of the
    uniform rank to `ALMOST_FULL` of break-even. Layers without a curve keep the uniform rank."""
    share = budget / sum(item.size * item.count for item in items)
    curves = [() if item.curve is None else item.curve for item in items]
    levels = [  # the loss that a parameter of each further rank saves, of each layer
        sorted(-float(value) * item.width / item.cost for value in curve)
        for item, curve in zip(items, curves, strict=True)
    ]

    def at(log_margin: float) -> list[float]:
        margin, ranks = exp(log_margin), []
        for item, falling in zip(items, levels, strict=True):
            uniform = item.rank_of(share * item.size)
            useful = bisect_left(falling, -margin) / item.width
            wanted = useful if falling else uniform
            ranks.append(min(max(wanted, floor * uniform), ALMOST_FULL * item.full))
        return ranks

    return at(_bisect(lambda t: _spent(items, at(t)) <= budget, -700.0, 700.0))


def snap(items: Sequence[Item], exact: Sequence[float], budget: float) -> list[int]:
    """Round `exact` ranks to multiples that kernels like (16, 8, 4, 2 or 1 steps): the nearest ones if
    they meet `budget` within half of `TOLERANCE`, else ranks below, in finer steps where needed."""
    units = [_unit(rank, item.step) for rank, item in zip(exact, items, strict=True)]
    nearest = [
        min(max(round(rank / unit), 1) * unit, item.most)
        for rank, unit, item in zip(exact, units, items, strict=True)
    ]
    if abs(budget - _spent(items, nearest)) <= TOLERANCE / 2 * budget:
        return nearest
    while True:
        ranks = _fill(items, exact, units, budget)
        missed = budget - _spent(items, ranks)
        coarse = [n for n, item in enumerate(items) if units[n] > item.step]
        if missed <= TOLERANCE / 2 * budget or not coarse:
            return _closest(items, ranks, budget) if abs(missed) > TOLERANCE * budget else ranks
        worst = max(coarse, key=lambda n: units[n] * items[n].price)
        units[worst] //= 2


def _scaled(items: Sequence[Item], wanted: Sequence[float], budget: float) -> list[float]:
    """The `wanted` ranks, scaled to spend `budget` and limited to what is possible."""

    def at(scale: float) -> list[float]:
        pairs = zip(items, wanted, strict=True)
        return [min(max(w * scale, item.step), max(item.full, item.step)) for item, w in pairs]

    scale = _bisect(lambda t: _spent(items, at(exp(-t))) <= budget, -20.0, 20.0)
    return at(exp(-scale))


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least t for which `holds` is true, as it is from some t on."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _spent(items: Sequence[Item], ranks: Sequence[float]) -> float:
    return sum(rank * item.price for rank, item in zip(ranks, items, strict=True))


def _unit(rank: float, step: int) -> int:
    """The largest of 16, 8, 4, 2 times `step` to which rounding moves `rank` by 2% at most."""
    return next((m * step for m in (16, 8, 4, 2) if m * step * 25 <= rank), step)


def _fill(
    items: Sequence[Item], exact: Sequence[float], units: Sequence[int], budget: float
) -> list[int]:
    """Round down, then spend what is left on the items that lost the largest part of a unit."""
    parts = [rank / unit + 1e-6 for rank, unit in zip(exact, units, strict=True)]
    ranks = [max(int(part) * unit, unit) for part, unit in zip(parts, units, strict=True)]
    left = budget - _spent(items, ranks)
    for n in sorted(range(len(items)), key=lambda n: int(parts[n]) - parts[n]):
        price = units[n] * items[n].price
        if price <= left and ranks[n] + units[n] <= items[n].full:
            ranks[n] += units[n]
            left -= price
    return ranks


def _closest(items: Sequence[Item], ranks: list[int], budget: float) -> list[int]:
    """Move ranks by single steps as long as that comes closer to the budget."""
    ranks = list(ranks)
    for _ in range(64):
        surplus = _spent(items, ranks) - budget
        moves = [(n, d * item.step) for n, item in enumerate(items) for d in (-1, 1)]
        moves = [(n, move) for n, move in moves if 0 < ranks[n] + move <= items[n].full]
        if not moves:
            return ranks
        n, move = min(moves, key=lambda m: abs(surplus + m[1] * items[m[0]].price))
        if abs(surplus + move * items[n].price) >= abs(surplus):
            return ranks
        ranks[n] += move
    return ranks
