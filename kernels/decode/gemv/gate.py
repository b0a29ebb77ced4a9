"""``act(gate) ⊙ up`` of what two stages of one launch have stored side by side."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options
from blr.kernels.decode.gemv.triton import activate

COLUMNS = 512  # of a program


@triton.jit
def gate_kernel(
    both, both_token, y, y_token, width, BK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    """A part of a token's row a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    ok = column < width
    both += tl.program_id(0) * both_token
    gate = tl.load(both + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + width + column, mask=ok, other=0.0).to(tl.float32)
    y += tl.program_id(0) * y_token
    tl.store(y + column, (activate(gate, ACT) * up).to(y.dtype.element_ty), mask=ok)


def gate(both: Tensor, y: Tensor, *, activation: str, pdl: bool = False) -> None:
    """``y = act(both[:, :f]) ⊙ both[:, f:]`` of both [n, 2 f] and y [n, f], in float32, rounded once."""
    options = launch_options(pdl)
    run_kernel(
        gate_kernel,
        (len(y), -(-y.shape[1] // COLUMNS)),
        *(both, both.stride(0), y, y.stride(0), y.shape[1]),
        BK=COLUMNS,
        ACT=activation,
        num_warps=4,
        **options,
    )
