"""Launches a product with bias and activation as one kernel: what an MLP makes of ranks, written once.

Apart, the library's product writes ``x Wᵀ + b`` and the activation reads and writes all of it again,
which takes as long as the product where k is a rank (scripts/log).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.common.available import kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.registration import rows
from blr.kernels.common.replay import Launches
from blr.kernels.decode.gemm.launch import bmm, tma_ready

LEAST = 1024  # tokens from which it was measured to win (scripts/log)
RANKS = 768  # k up to which: above, its product takes longer than the library's
WARPS = 8  # of a program, of 128 x 128: up to a seventh faster than 4
DTYPES = (torch.float16, torch.bfloat16)
OVER: dict[str, Callable[[Tensor], Tensor]] = {
    **{"gelu": torch.ops.aten.gelu_, "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh")},
    **{"silu": torch.ops.aten.silu_, "relu": torch.relu_},
}


def activated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``φ(x weightᵀ + bias)``, contiguous, without gradients: by one kernel where that is faster,
    else the library's product, written over.

    Args:
        x: [..., k], weight: [m, k], bias: [m] or None. activation: a name in `OVER`.
    """
    lies = None if bias is None else bias.stride()
    key = (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, x.device, activation, lies)
    run = _PLANS.get(key) or _PLANS.keep(key, _plan(x, weight, bias, activation))
    y: Tensor = run(x, weight, bias)
    return y


_PLANS = Plans()


def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Callable[..., Tensor]:
    """What computes it for all tensors that lie like these."""
    k = x.shape[-1]
    fits = 0 < k <= RANKS and x.numel() // k >= LEAST and (bias is None or bias.stride() == (1,))
    fits = fits and kernels_on(x.device) and x.dtype == weight.dtype in DTYPES
    if not fits or not tma_ready(rows(x)[None], weight.mT[None]):
        return partial(_plain, activation=activation)
    return Launches(partial(_launched, activation=activation))


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return OVER[activation](linear(x, weight, bias))


def _launched(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    shift = None if bias is None else bias[None]
    bmm(rows(x)[None], weight.mT[None], rows(y)[None], shift, activation=activation, num_warps=WARPS)
    return y
