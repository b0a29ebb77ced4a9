"""A router's choice of experts, with the norm before it, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.gemv.launch import power_of_two


class Routing(NamedTuple):
    """How a router chooses: `number` experts of the largest softmax, whose weights are `scaled` to a sum
    of 1."""

    number: int
    scaled: bool


def routed(
    x: Tensor, gain: Tensor, eps: float, logits: Tensor, routing: Routing, dtype: torch.dtype, pdl: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x [n, d] in `dtype`, the experts that `logits` [n, E] choose, and their weights: as
    `routed_reference`, by one kernel. x, logits: float32 of stride 1. No gradients."""
    from blr.kernels.layers.routing.triton import routing_kernel

    (rows, width), experts, k = x.shape, logits.shape[1], routing.number
    normed = torch.empty(rows, width, dtype=dtype, device=x.device)
    chosen = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    weights = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    arguments = (x, x.stride(0), gain, eps, logits, logits.stride(0), normed, chosen, weights)
    sizes = {"BC": power_of_two(width), "BE": power_of_two(experts), "BK": power_of_two(k)}
    constants = {"K": k, "SCALED": routing.scaled, **sizes, "PDL": pdl}
    early = {"launch_pdl": True} if pdl else {}
    launch(routing_kernel, (rows,), (*arguments, width, experts), constants, num_warps=8, **early)
    return normed, chosen, weights


def routed_reference(
    x: Tensor, gain: Tensor, eps: float, logits: Tensor, routing: Routing, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`routed` in plain torch."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()
    weights, chosen = logits.float().softmax(-1).topk(routing.number)
    if routing.scaled:
        weights = weights / weights.sum(-1, keepdim=True)
    return normed.to(dtype), chosen, weights
