"""Outputs that two stages have left in another order, put in their places by one launch.

The index costs 4 bytes an output beside rows of weights of some thousand bytes each, and what follows
elementwise (the bias, the residual, ``act(gate) ⊙ up``) no launch of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options
from blr.kernels.layers.pivoted.places import Places

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.decode.gemv.triton import activate
except ImportError as error:
    raise ImportError("these kernels need triton") from error

COLUMNS = 512  # of a program


@triton.jit
def gathered(source, at, bias, column, ok, BIAS: tl.constexpr):
    """The numbers of a token at `at`, with the bias of their columns."""
    value = tl.load(source + at, mask=ok, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + column, mask=ok, other=0.0).to(tl.float32)
    return value


@triton.jit
def gather_kernel(
    source, source_token, places, bias, y, y_token, width,
    BK: tl.constexpr, ACT: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of a token's row a program. With ACT places and bias are those of gate and then of up."""
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    ok = column < width
    at = tl.load(places + column, mask=ok, other=0)
    beside = at
    if ACT != "":
        beside = tl.load(places + width + column, mask=ok, other=0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source += tl.program_id(0) * source_token
    value = gathered(source, at, bias, column, ok, BIAS)
    if ACT != "":
        value = activate(value, ACT) * gathered(source, beside, bias, width + column, ok, BIAS)
    y += tl.program_id(0) * y_token + column
    if ADD:
        value += tl.load(y, mask=ok, other=0.0).to(tl.float32)
    tl.store(y, value.to(y.dtype.element_ty), mask=ok)


def gather(
    source: Tensor,
    places: Places,
    y: Tensor,
    *,
    activation: str = "",
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`places.into` as one kernel, of views whose columns have stride 1."""
    bias = places.bias
    options: dict[str, Any] = launch_options(pdl)
    run_kernel(
        gather_kernel,
        (len(y), -(-y.shape[1] // COLUMNS)),
        *(source, source.stride(0), places.at, source if bias is None else bias),
        *(y, y.stride(0), y.shape[1]),
        BK=COLUMNS,
        ACT=activation,
        ADD=add,
        BIAS=bias is not None,
        num_warps=4,
        **options,
    )
