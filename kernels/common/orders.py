"""Order of the axes of stored factors in memory, by structure. No torch. Shipped in checkpoints."""

from __future__ import annotations

Order = tuple[int, ...]

# Structure -> factor -> order of the canonical axes in memory, the last one with stride 1. Input
# factors are stored with the features that a product sums over last: rows are read in one piece.
LAYOUTS: dict[str, dict[str, Order]] = {
    "dense": {"weight": (0, 1)},
    "svd": {"U": (0, 1), "V": (1, 0)},  # V stored [r, i]
    "svd grouped": {"U": (0, 1, 2), "V": (0, 2, 1)},  # V stored [G, r, i]
    "pivoted": {"U": (0, 1), "V": (1, 0)},
    "monarch": {"U": (0, 1, 2), "V": (0, 2, 1)},  # V stored [b, r, p]
    "blast": {"U": (0, 1, 2), "S": (2, 0, 1), "V": (0, 2, 1)},  # S stored [r, k, l]
    "ks": {"factors": (0, 3, 1, 2)},  # stored [a, d, b, c]
}


def order_of(structure: str, name: str, dims: int) -> Order:
    """The order of a factor's axes in memory.

    Args:
        structure: a spec's. name: the factor's, as "V" or "factors.2". dims: its axes.

    Raises:
        KeyError: no such structure or factor.
    """
    kind = "svd grouped" if (structure, dims) == ("svd", 3) else structure
    return LAYOUTS[kind][name.partition(".")[0]]
