"""Activations to float8 with a scale a token, and batched products of float8 with what follows them."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401  (for the launcher)

from blr.kernels.decode.gemm.triton import grouped_tile, split


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def gelu_tanh(v):
    return 0.5 * v * (1.0 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))


@triton.jit
def activated(
    v, other, gain, eps, K, MAKE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What a row is before it is rounded to float8: of itself, its norm, silu or GELU, times `other` or
    not, in float32, rounded to the model's dtype where the model rounds."""
    if MAKE == "rms":
        v = (v * tl.rsqrt(tl.sum(v * v, 0) / K + eps)).to(DTYPE).to(tl.float32) * gain
    elif MAKE == "layer":
        inside = tl.arange(0, BLOCK) < K
        v = tl.where(inside, v - tl.sum(v, 0) / K, 0.0)
        v = tl.where(inside, v * tl.rsqrt(tl.sum(v * v, 0) / K + eps) * gain + other, 0.0)
    elif MAKE == "swiglu":
        v = (v * tl.sigmoid(v)).to(DTYPE).to(tl.float32) * other
    elif MAKE == "geglu":
        v = gelu_tanh(v).to(DTYPE).to(tl.float32) * other
    elif MAKE == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif MAKE == "gelu_tanh":
        v = gelu_tanh(v)
    return v.to(DTYPE).to(tl.float32)


@triton.jit
def quantize_kernel(
    x, other, gain, y, q, scale, unit_norm, norm, K, x_row, other_row, y_row, q_row, eps,
    MAKE: tl.constexpr, BLOCK: tl.constexpr, SLACK: tl.constexpr, LARGEST: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """A row in float8: `q`, its scale, and a bound of the norm of what `q` stands for (`norm`), over the
    scale and inverted in `unit_norm`. KEEP: what is rounded goes to `y`, too."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < K
    dtype: tl.constexpr = x.dtype.element_ty
    v = tl.load(x + row * x_row + lane, mask=inside, other=0.0).to(tl.float32)
    by, beside = v, v
    if MAKE == "rms" or MAKE == "layer":
        by = tl.load(gain + lane, mask=inside, other=0.0).to(tl.float32)
    if MAKE == "swiglu" or MAKE == "geglu" or MAKE == "layer":
        beside = tl.load(other + row * other_row + lane, mask=inside, other=0.0).to(tl.float32)
    v = activated(v, beside, by, eps, K, MAKE, dtype, BLOCK)
    if KEEP:
        tl.store(y + row * y_row + lane, v.to(dtype), mask=inside)
    step = tl.max(tl.abs(v), 0) / LARGEST
    unit = tl.where(step > 0, v / step, 0.0)
    length = SLACK * tl.sqrt(tl.sum(unit * unit, 0))
    tl.store(q + row * q_row + lane, unit.to(q.dtype.element_ty), mask=inside)
    tl.store(scale + row, step)
    tl.store(unit_norm + row, tl.where(length > 0, 1.0 / length, 0.0))
    tl.store(norm + row, step * length)


@triton.jit
def scaled_fp8(
    sums, by_row, by_col, bias, batch, rows, cols, M, N, by_batch, bias_batch, BIAS: tl.constexpr
):  # fmt: skip
    """A tile of sums scaled by row and column, plus the bias."""
    down = tl.load(by_row + rows, mask=rows < M, other=0.0)
    along = tl.load(by_col + batch * by_batch + cols, mask=cols < N, other=0.0)
    y = sums * down[:, None] * along[None, :]
    if BIAS:
        shift = tl.load(bias + batch * bias_batch + cols, mask=cols < N, other=0.0)
        y += shift.to(tl.float32)[None, :]
    return y


@triton.jit
def finish_fp8(
    sums, by_row, by_col, bias, c, batch, rows, cols, M, N, by_batch, bias_batch,
    c_batch, c_row, c_part, part, BIAS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Store `scaled_fp8` with its columns permuted."""
    y = scaled_fp8(sums, by_row, by_col, bias, batch, rows, cols, M, N, by_batch, bias_batch, BIAS)
    to = c + batch * c_batch + rows[:, None] * c_row + split(cols, part, c_part, RUN)[None, :]
    tl.store(to, y.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def product_kernel(
    a, b, by_row, by_col, bias, c,
    M, N, K, a_batch, a_row, b_batch, b_row, by_batch, bias_batch, c_batch, c_row, c_part, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BIAS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """``c[g, m, col(n)] = by_row[m] · by_col[g, n] · Σ_k a[g, m, k] b[g, n, k] + bias[g, n]``, K of
    stride 1 in both."""
    batch = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows = (tile_m * BM + tl.arange(0, BM)).to(tl.int64)
    cols = tile_n * BN + tl.arange(0, BN)
    lane = tl.arange(0, BK)
    at = a + batch * a_batch + (rows % M)[:, None] * a_row + lane[None, :]
    bt = b + batch * b_batch + (cols % N).to(tl.int64)[None, :] * b_row + lane[:, None]
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        inside = lane < K - k
        left = tl.load(at, mask=inside[None, :], other=0.0)
        right = tl.load(bt, mask=inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
        at += BK
        bt += BK
    finish_fp8(sums, by_row, by_col, bias, c, batch, rows, cols, M, N, by_batch, bias_batch,
               c_batch, c_row, c_part, part, BIAS, RUN)  # fmt: skip


@triton.jit
def product_tma_kernel(
    a, b, to, by_row, by_col, bias, c,
    M, N, K, BATCHES, a_rows, a_cols, b_rows, b_cols,
    by_batch, bias_batch, c_batch, c_row, c_part, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    RUN: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same through the bulk copy engine, a program for every tile or, of a smaller grid, for some.

    a and b are descriptors of matrices of which batch g starts at row g·`a_rows`, column g·`a_cols`
    (`b_…` likewise); one of the two ends with its batch's K columns. HALVES: `to` is a descriptor of
    c, of tiles [BM, BN / 2], whose batch g starts at row g·`c_batch`, column g·`c_row`.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    each = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), each * BATCHES, tl.num_programs(0), flatten=FLATTEN):
        batch = tile // each
        tile_m, tile_n = grouped_tile(tile % each, tiles_m, tiles_n, GROUP)
        row, col = tile_m * BM, tile_n * BN
        sums = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            left = a.load([batch * a_rows + row, batch * a_cols + k])
            right = b.load([batch * b_rows + col, batch * b_cols + k])
            sums = tl.dot(left, right.T, sums)
        rows = (row + tl.arange(0, BM)).to(tl.int64)
        cols = col + tl.arange(0, BN)
        if HALVES:  # half a tile at a time: shared memory for another stage
            y = scaled_fp8(
                sums, by_row, by_col, bias, batch, rows, cols, M, N, by_batch, bias_batch, BIAS
            )  # fmt: skip
            to_row, to_col = batch * c_batch + row, batch * c_row + col
            halves = tl.permute(tl.reshape(y, (BM, 2, BN // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            to.store([to_row, to_col], first.to(c.dtype.element_ty))
            to.store([to_row, to_col + BN // 2], second.to(c.dtype.element_ty))
        else:
            finish_fp8(sums, by_row, by_col, bias, c, batch.to(tl.int64), rows, cols, M, N, by_batch,
                       bias_batch, c_batch, c_row, c_part, part, BIAS, RUN)  # fmt: skip


@triton.jit
def mix_kernel(
    z, s, w, n, rank, z_batch, z_row, w_batch, w_row,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """``w[k] = Σ_l s[k, l] ⊙ z[l]`` of [tokens, rank] each, in float8; every z is read once.

    WIDTH: the power of two that holds BLOCKS.
    """
    k = tl.arange(0, WIDTH)[:, None, None]
    rows = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[None, :, None]
    cols = (tl.program_id(1) * RANKS + tl.arange(0, RANKS))[None, None, :]
    inside, coupled = (rows < n) & (cols < rank), (k < BLOCKS) & (cols < rank)
    sums = tl.zeros([WIDTH, TOKENS, RANKS], tl.float32)
    at = z + rows * z_row + cols
    for block in tl.range(0, BLOCKS):
        by = tl.load(s + (k * BLOCKS + block) * rank + cols, mask=coupled, other=0.0)
        sums += by * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        at += z_batch  # step by step: all of them may be more than 32 bits count
    to = w + k.to(tl.int64) * w_batch + rows * w_row + cols
    tl.store(to, sums.to(w.dtype.element_ty), mask=inside & (k < BLOCKS))
