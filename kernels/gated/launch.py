"""Launches the product of an MLP's gate."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import rows
from blr.kernels.gated.reference import GATES

BLOCK = 1024  # columns of a program: eight of half precision a thread
MOST = (1 << 16) - 1  # rows that a grid has room for


def gated(gate: Tensor, up: Tensor, make: str) -> Tensor:
    """As of `reference.GATES[make]`, [..., K], contiguous, without gradients.

    Args:
        gate, up: [..., K] of one shape, dtype and device. make: a name in `GATES`.
    """
    left, right = rows(gate), rows(up)
    n, K = left.shape
    if not kernels_on(gate.device) or not 0 < n <= MOST or left.stride(1) != 1 or right.stride(1) != 1:
        return GATES[make](gate, up)
    from blr.kernels.gated.triton import gated_kernel

    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    given = (left, right, y, K, left.stride(0), right.stride(0))
    constants = {"MAKE": make, "BLOCK": BLOCK}
    launch(gated_kernel, (-(-K // BLOCK), n), given, constants, num_warps=4)
    return y
