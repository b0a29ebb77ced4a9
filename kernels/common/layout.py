"""Physical order of the axes of stored factors: what kernels read fastest. Shipped in checkpoints.

Shapes never change, neither in files nor in modules: a layout is a matter of strides. A factor in
kernel layout is a canonical *view* of a tensor whose axes lie in another order in memory.
"""

from __future__ import annotations

from torch import Tensor

from blr.kernels.common.orders import Order


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
