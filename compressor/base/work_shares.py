"""Work of predicted cost, shared out."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(costs: Sequence[float], count: int) -> list[int]:
    """Which of `count` processes does each item: the costliest first, each to whom has least so far.

    The same for the same costs. Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).
    """
    owners, loads = [0] * len(costs), [0.0] * count
    for item in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owner = min(range(count), key=lambda process: (loads[process], process))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners
