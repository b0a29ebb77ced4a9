"""A batch of matrix products with a bias, an activation and a permutation of columns in its epilogue."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401  (for the launcher)

from blr.kernels.decode.gemv.triton import activate


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP rows of tiles at a time, column by column, so that
    the operands of neighbours stay in L2."""
    per_group = GROUP * tiles_n
    first = (program // per_group) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + (program % per_group) % height, (program % per_group) // height


@triton.jit
def finish(
    sums, bias, c, batch, rows, cols, M, N, bias_batch, c_batch, c_row, c_part, part,
    BIAS: tl.constexpr, RUN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Add the bias to a tile of sums, activate it and store it with its columns permuted."""
    if BIAS:
        shift = tl.load(bias + batch * bias_batch + cols, mask=cols < N, other=0.0)
        sums += shift.to(tl.float32)[None, :]
    sums = activate(sums, ACT)
    to = c + batch * c_batch + rows[:, None] * c_row + split(cols, part, c_part, RUN)[None, :]
    tl.store(to, sums.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def bmm_kernel(
    a, b, bias, c,
    M, N, K,
    a_batch, a_row, a_col, b_batch, b_row, b_col, bias_batch, c_batch, c_row, c_part, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, RUN: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``c[g, m, col(n)] = φ(Σ_k a[g, m, k] b[g, k, n] + bias[g, n])``, sums in float32.

    Column n lands at ``(n // part) * c_part + n % part`` of its row.
    """
    batch = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    cols = tile_n * BN + tl.arange(0, BN)
    lane = tl.arange(0, BK)
    wide = cols.to(tl.int64)
    # Rows and columns beyond the edge wrap around: loads without masks; the store has one.
    at = a + batch * a_batch + (rows % M)[:, None] * a_row + lane[None, :] * a_col
    bt = b + batch * b_batch + lane[:, None] * b_row + (wide % N)[None, :] * b_col
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        inside = lane < K - k
        left = tl.load(at, mask=inside[None, :], other=0.0)
        right = tl.load(bt, mask=inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
        at += BK * a_col
        bt += BK * b_row
    finish(sums, bias, c, batch, rows, cols, M, N, bias_batch, c_batch, c_row, c_part, part,
           BIAS, RUN, ACT)  # fmt: skip


@triton.jit
def bmm_tma_kernel(
    a, b, bias, c,
    M, N, K, a_rows, a_cols, b_rows, b_cols,
    bias_batch, c_batch, c_row, c_part, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, RUN: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """The same through the bulk copy engine. a and b are descriptors of matrices with K contiguous, of
    which batch g starts at row g·`a_rows`, column g·`a_cols` (`b_…` likewise). One of the two ends
    with its batch's K columns: it gives zeros beyond, so that the next batch's columns, which the
    other one gives there, do not count."""
    batch = tl.program_id(1)
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    row, col = tile_m * BM, tile_n * BN
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        left = a.load([batch * a_rows + row, batch * a_cols + k])
        right = b.load([batch * b_rows + col, batch * b_cols + k])
        sums = tl.dot(left, right.T, sums)
    rows = (row + tl.arange(0, BM)).to(tl.int64)
    cols = col + tl.arange(0, BN)
    finish(sums, bias, c, batch.to(tl.int64), rows, cols, M, N, bias_batch, c_batch, c_row, c_part, part,
           BIAS, RUN, ACT)  # fmt: skip


@triton.jit
def split(cols, part, c_part, RUN: tl.constexpr):
    """Offsets ``(col // part) * c_part + col % part``; RUN divides `part`: so many stay neighbours,
    which the compiler sees from this form and then stores them together."""
    run = cols // RUN
    runs = part // RUN
    return (run // runs).to(tl.int64) * c_part + (run % runs) * RUN + cols % RUN
