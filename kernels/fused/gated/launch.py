"""Launches the product of an MLP's gate."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import rows
from blr.kernels.common.replay import Launches
from blr.kernels.fused.gated.reference import GATES

BLOCK = 1024  # columns of a program: eight of half precision a thread
MOST = (1 << 16) - 1  # rows that a grid has room for


def gated(gate: Tensor, up: Tensor, make: str) -> Tensor:
    """As of `reference.GATES[make]`, [..., K], contiguous, without gradients.

    Args:
        gate, up: [..., K] of one shape, dtype and device. make: a name in `GATES`.
    """
    key = (gate.shape, gate.stride(), gate.dtype, gate.device, up.stride(), up.dtype, up.device, make)
    run = _PLANS.get(key)
    if run is None:
        run = _PLANS.keep(key, _plan(gate, up, make))
    y: Tensor = run(gate, up)
    return y


_PLANS = Plans()


def _plan(gate: Tensor, up: Tensor, make: str) -> Callable[..., Tensor]:
    """What computes it for all tensors that lie like these."""
    n = gate.numel() // max(gate.shape[-1], 1)
    lies = gate.stride(-1) == up.stride(-1) == 1
    if not kernels_on(gate.device) or not 0 < n <= MOST or not lies:
        return GATES[make]
    return Launches(partial(_launched, make=make))


def _launched(gate: Tensor, up: Tensor, make: str) -> Tensor:
    from blr.kernels.fused.gated.triton import gated_kernel

    left, right = rows(gate), rows(up)
    n, K = left.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    given = (left, right, y, K, left.stride(0), right.stride(0))
    constants = {"MAKE": make, "BLOCK": BLOCK}
    launch(gated_kernel, (-(-K // BLOCK), n), given, constants, num_warps=4)
    return y
