"""Physical order of the axes of stored factors: what kernels read fastest. Shipped in checkpoints.

Shapes never change, neither in files nor in modules: a layout is a matter of strides. A factor in
kernel layout is a canonical *view* of a tensor whose axes lie in another order in memory.
"""

from __future__ import annotations

from torch import Tensor

Order = tuple[int, ...]

# Structure -> factor -> order of the canonical axes in memory, the last one with stride 1. Input
# factors are stored with the features that a product sums over last: rows are read in one piece.
LAYOUTS: dict[str, dict[str, Order]] = {
    "svd": {"U": (0, 1), "V": (1, 0)},  # V stored [r, i]
    "svd grouped": {"U": (0, 1, 2), "V": (0, 2, 1)},  # V stored [G, r, i]
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


def to_physical(tensor: Tensor, order: Order) -> Tensor:
    """The canonical `tensor` as it lies in memory in kernel layout: contiguous, axes in `order`."""
    return tensor.permute(order).contiguous()


def canonical_view(physical: Tensor, order: Order) -> Tensor:
    """The view of `physical` with its axes in canonical order; undoes `to_physical`."""
    return physical.permute(tuple(order.index(axis) for axis in range(len(order))))


def in_order(tensor: Tensor, order: Order) -> bool:
    """Whether the canonical `tensor` lies in memory with its axes in `order`, without gaps."""
    return tensor.permute(order).is_contiguous()


def relaid(tensor: Tensor, order: Order) -> Tensor:
    """`tensor`, same shape and values, lying in `order`: itself if it does already."""
    return tensor if in_order(tensor, order) else canonical_view(to_physical(tensor, order), order)
