"""The weight of dense blocks over all columns l of a Kronecker-sparse factor, in one launch.

Row j·d + l, column k·d + m of block i is w[i, j, k, l] if l = m, else zero: G = d of
`variants.densify`, as a plain block-diagonal matrix.
"""

from __future__ import annotations

from torch import Tensor

from blr.kernels.layers.kronecker.tiles import cdiv, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError("the kernels of Kronecker-sparse factors need triton") from error


@triton.jit
def densify_kernel(
    w,
    dense,
    b,
    c,
    wa,
    wb,
    wc,
    wd,
    D: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
):
    """dense [a, b·D, c·D], contiguous, from w [a, b, c, D] in any strides."""
    tiles_f, tiles_r = tl.cdiv(c * D, BF), tl.cdiv(b * D, BR)
    pid = tl.program_id(0)
    i = (pid // tiles_f // tiles_r).to(tl.int64)
    rows = (pid // tiles_f % tiles_r) * BR + tl.arange(0, BR)
    columns = pid % tiles_f * BF + tl.arange(0, BF)
    inside = (rows < b * D)[:, None] & (columns < c * D)[None, :]
    diagonal = inside & ((rows % D)[:, None] == (columns % D)[None, :])
    at = i * wa + (rows // D).to(tl.int64)[:, None] * wb + (columns // D).to(tl.int64)[None, :] * wc
    value = tl.load(w + at + (rows % D).to(tl.int64)[:, None] * wd, mask=diagonal, other=0.0)
    row = i * (b * D) + rows
    tl.store(dense + row[:, None] * (c * D) + columns[None, :], value, mask=inside)


def densify_all(w: Tensor) -> Tensor:
    """[a, b·d, c·d] of w [a, b, c, d] in any dtype and strides."""
    a, b, c, d = w.shape
    dense = w.new_empty(a, b * d, c * d)
    BF = power_of_two(c * d, 1, 256)
    BR = power_of_two(b * d, 1, 4096 // BF)
    grid = (a * cdiv(b * d, BR) * cdiv(c * d, BF),)
    densify_kernel[grid](w, dense, b, c, *w.stride(), D=d, BR=BR, BF=BF)
    return dense
