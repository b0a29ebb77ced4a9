"""The product of an MLP's gate, one kernel that reads both once: it is bound by memory alone."""

import triton
import triton.language as tl

from blr.kernels.fp8.triton import activated


@triton.jit
def gated_kernel(
    gate, up, y, K, gate_row, up_row, MAKE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y [n, K], contiguous, of gate and up [n, K] whose rows lie `gate_row` and `up_row` apart."""
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < K
    v = tl.load(gate + row * gate_row + lane, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(up + row * up_row + lane, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    v = activated(v, beside, v, 0.0, K, MAKE, dtype, BLOCK)
    tl.store(y + row * K + lane, v.to(dtype), mask=inside)
