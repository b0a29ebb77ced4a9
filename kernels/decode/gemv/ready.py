"""Inputs of several tokens, normed and in the dtype of the weights, once for all programs of a launch.

From three tokens on products run on the tensor cores, whose operands come through shared memory in
the weights' dtype. Inputs that lie so are copied there while products run; others pass through the
registers of every program, a barrier a chunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options, power_of_two

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.decode.gemv.triton import input_chunk
except ImportError as error:
    raise ImportError("these kernels need triton") from error

WIDEST = 4096  # inputs that a program holds at once


@triton.jit
def ready_kernel(
    x, x_token, gain, y, y_token, width, eps, BK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr
):
    """``y = x · gain / rms(x)`` of a token a program, or x alone, in the dtype of y."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    lane = tl.arange(0, BK)
    scale = 1.0
    if NORM:
        square = tl.zeros([BK], tl.float32)
        for start in range(0, width, BK):
            v = input_chunk(x + token * x_token, start + lane, width)
            square += v * v
        scale = tl.rsqrt(tl.sum(square, 0) / width + eps)
    for start in range(0, width, BK):
        v = input_chunk(x + token * x_token, start + lane, width) * scale
        if NORM:
            v *= input_chunk(gain, start + lane, width)
        at = y + token * y_token + start + lane
        tl.store(at, v.to(y.dtype.element_ty), mask=start + lane < width)


def ready(
    x: Tensor, out: Tensor, *, gain: Tensor | None = None, eps: float = 0.0, pdl: bool = False
) -> None:
    """``out = norm(x)`` [n, K] in the dtype of `out`; with `gain` [K] after an RMS norm.

    Reference: ``x * rsqrt(mean(x²) + eps) * gain`` in float32, rounded once.
    """
    options: dict[str, Any] = launch_options(pdl)
    run_kernel(
        ready_kernel,
        (len(x),),
        *(x, x.stride(0), x if gain is None else gain, out, out.stride(0), x.shape[1], eps),
        BK=min(power_of_two(x.shape[1]), WIDEST),
        NORM=gain is not None,
        num_warps=8,
        **options,
    )
