"""Layer normalization of some rows at a time, each read once: it is bound by memory alone."""

import triton
import triton.language as tl


@triton.jit
def layer_norm_kernel(
    x, weight, bias, y, n, K, eps, x_row, y_row,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [n, K] of x [n, K], whose rows lie `y_row` and `x_row` apart; weight, bias [K]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = (row < n) & (lane < K)
    v = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    v = tl.where(inside, v - tl.sum(v, 1)[:, None] / K, 0.0)
    v *= tl.rsqrt(tl.sum(v * v, 1) / K + eps)[:, None]
    v *= tl.load(weight + lane, mask=lane < K, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + lane, mask=lane < K, other=0.0).to(tl.float32)
    tl.store(y + row * y_row + lane, v.to(y.dtype.element_ty), mask=inside)
