"""Physical order of the axes of stored factors: a matter of strides, shapes never change.

A rank that is no multiple of `ALIGNED` has zeros behind it: products are two to three times as slow
where rows do not start at multiples of 16 bytes.
"""

import torch
from torch import Tensor

from blr.kernels.common.orders import Order

ALIGNED = 16  # ranks: Triton takes rows for aligned where their strides are multiples of this


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


def wide_rank(rank: int) -> int:
    """`rank` and the zeros behind it."""
    return -(-rank // ALIGNED) * ALIGNED


def spaced(tensor: Tensor, order: Order, width: int) -> Tensor:
    """`tensor`, same shape and values, lying in `order` inside zeros where its last axis is `width`."""
    shape = (*tensor.shape[:-1], width)
    physical = torch.zeros([shape[axis] for axis in order], dtype=tensor.dtype, device=tensor.device)
    found = canonical_view(physical, order)[..., : tensor.shape[-1]]
    return found.copy_(tensor)


def with_zeros(tensor: Tensor, width: int) -> Tensor:
    """What `spaced` laid `tensor` in: its last axis with the zeros behind it."""
    return tensor.as_strided((*tensor.shape[:-1], width), tensor.stride(), tensor.storage_offset())
