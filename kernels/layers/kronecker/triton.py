"""Kronecker-sparse factor in one kernel a factor, one column l a program; dense blocks of all columns.

The product of factor w with ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]`` is a·d dense
products y[:, i, :, l] = x[:, i, :, l] w[i, :, :, l]ᵀ. A program computes one [BN, BB] tile of one
of them; x, w and y are addressed through strides, so every layout is correct. It is fast where the
columns of x of one l are contiguous (d = 1, or all columns made one dense block by `densify`) and
where w is the traffic (decode). `grouped.py` has the kernel for the rest.
Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blr.kernels.layers.kronecker.tiles import cdiv, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError("the kernels of Kronecker-sparse factors need triton") from error


@triton.jit
def program_tile(tiles_n, inner, GROUP_N: tl.constexpr):
    """(tile of the batch, rest): GROUP_N tiles of the batch are fastest, then `inner` others."""
    pid = tl.program_id(0)
    width = GROUP_N * inner
    first = pid // width * GROUP_N
    size = tl.minimum(tiles_n - first, GROUP_N)
    return first + pid % width % size, pid % width // size


@triton.jit
def far(index, stride):
    """index·stride in 64 bits: b·n·r passes 2³¹ at ordinary sizes."""
    return index.to(tl.int64) * stride


@triton.jit
def plain_kernel(
    x,
    w,
    bias,
    y,
    n,
    a,
    b,
    c,
    xn,
    xf,
    yn,
    yf,
    wa,
    wb,
    wc,
    wd,
    L: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_B: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[n, a·b·L] = x[n, a·c·L] Kᵀ with w [a, b, c, L]."""
    tiles_b = tl.cdiv(b, BB)
    tile_n, rest = program_tile(tl.cdiv(n, BN), tiles_b * L * a, GROUP_N)
    tile_b, i, run = rest % tiles_b, rest // tiles_b // L, rest // tiles_b % L
    rows = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    js = tile_b * BB + tl.arange(0, BB)
    ks = tl.arange(0, BC)
    x_at = x + far(i * (c * L) + run, xf) + rows[:, None] * xn + far(ks * L, xf)[None, :]  # [BN, BC]
    w_at = w + far(i, wa) + far(run, wd) + far(js, wb)[None, :] + far(ks, wc)[:, None]  # [BC, BB]
    x_step = far(tl.full([], BC * L, tl.int32), xf)
    w_step = far(tl.full([], BC, tl.int32), wc)
    in_n = (rows < n)[:, None]
    in_b = (js < b)[None, :]
    acc = tl.zeros([BN, BB], tl.float32)
    for k in range(0, c, BC):
        x_mask = in_n if EVEN_C else in_n & (ks < c - k)[None, :]
        xt = tl.load(x_at, mask=x_mask, other=0.0)
        if EVEN_B and EVEN_C:
            wt = tl.load(w_at)
        else:
            wt = tl.load(w_at, mask=in_b & (ks < c - k)[:, None], other=0.0)
        acc = tl.dot(xt, wt, acc, input_precision=PRECISION)
        x_at += x_step
        w_at += w_step
    column = i * (b * L) + run + js * L
    if HAS_BIAS:
        acc += tl.load(bias + column, mask=js < b, other=0.0).to(tl.float32)[None, :]
    y_at = y + rows[:, None] * yn + far(column, yf)[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=in_n & in_b)


@triton.jit
def decode_kernel(
    x,
    w,
    bias,
    y,
    n,
    a,
    b,
    c,
    xn,
    xf,
    yn,
    yf,
    wa,
    wb,
    wc,
    wd,
    L: tl.constexpr,
    N: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    EVEN_B: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The same for n ≤ N rows on CUDA cores: w is read once, products are summed over c at the end."""
    tiles_b = tl.cdiv(b, BB)
    pid = tl.program_id(0)
    tile_b, i, run = pid % tiles_b, pid // tiles_b // L, pid // tiles_b % L
    rows = tl.arange(0, N)
    js = tile_b * BB + tl.arange(0, BB)
    ks = tl.arange(0, BC)
    x_at = x + far(i * (c * L) + run, xf) + far(rows, xn)[:, None] + far(ks * L, xf)[None, :]
    w_at = w + far(i, wa) + far(run, wd) + far(js, wb)[:, None] + far(ks, wc)[None, :]
    x_step = far(tl.full([], BC * L, tl.int32), xf)
    w_step = far(tl.full([], BC, tl.int32), wc)
    acc = tl.zeros([N, BB, BC], tl.float32)
    for k in range(0, c, BC):
        in_c = (ks < c - k)[None, :]
        if EVEN_B and EVEN_C:
            wt = tl.load(w_at)
        else:
            wt = tl.load(w_at, mask=(js < b)[:, None] & in_c, other=0.0)
        xt = tl.load(x_at, mask=(rows < n)[:, None] & in_c, other=0.0)
        acc += wt.to(tl.float32)[None, :, :] * xt.to(tl.float32)[:, None, :]
        x_at += x_step
        w_at += w_step
    total = tl.sum(acc, 2)  # [N, BB]
    column = i * (b * L) + run + js * L
    if HAS_BIAS:
        total += tl.load(bias + column, mask=js < b, other=0.0).to(tl.float32)[None, :]
    y_at = y + far(rows, yn)[:, None] + far(column, yf)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=(rows < n)[:, None] & (js < b)[None, :])


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


def densify(w: Tensor) -> Tensor:
    """[a, b·d, c·d] of w [a, b, c, d] in any dtype and strides: row j·d + l, column k·d + m of block i
    is w[i, j, k, l] if l = m, else zero."""
    a, b, c, d = w.shape
    dense = w.new_empty(a, b * d, c * d)
    BF = power_of_two(c * d, 1, 256)
    BR = power_of_two(b * d, 1, 4096 // BF)
    grid = (a * cdiv(b * d, BR) * cdiv(c * d, BF),)
    densify_kernel[grid](w, dense, b, c, *w.stride(), D=d, BR=BR, BF=BF)
    return dense


def launch(
    kernel: Any, programs: int, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, **tile: Any
) -> Tensor:
    """``out = x Kᵀ + bias``, `programs` for each block of w.

    Args:
        x: [n, a·c·d], fp32, fp16 or bf16, any strides, fastest where the features are contiguous.
        w: [a, b, c, d] in the dtype of `x`, any strides, fastest where axis c has stride 1.
        out: [n, a·b·d], any strides; every element is written.
        bias: [a·b·d], contiguous, or None.
        tile: powers of two: BN, BB, BC of batch, outputs and inputs; GROUP_N, how many tiles of the
            batch run side by side on one weight; what else the kernel is compiled for.
    """
    a, b, c, _ = w.shape
    even = {"EVEN_B": b % tile["BB"] == 0, "EVEN_C": c % tile["BC"] == 0, "HAS_BIAS": bias is not None}
    strides = (*x.stride(), *out.stride(), *w.stride())
    kernel[(programs * a,)](x, w, bias, out, x.shape[0], a, b, c, *strides, **even, **tile)
    return out


def plain(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, *, G: int = 1, GROUP_N: int = 1,
    precision: str = "ieee", **tile: int,
) -> Tensor:  # fmt: skip
    """`launch`, a tile of one l a program (G = 1). precision: of fp32 products, "ieee" or "tf32"."""
    programs = cdiv(x.shape[0], tile["BN"]) * cdiv(w.shape[1], tile["BB"]) * w.shape[3]
    more = {"L": w.shape[3], "GROUP_N": GROUP_N, "PRECISION": precision}
    return launch(plain_kernel, programs, x, w, out, bias, **more, **tile)


def decode(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, **tile: int) -> Tensor:
    """`launch` for up to eight rows without the tensor core, sums in fp32."""
    programs = cdiv(w.shape[1], tile["BB"]) * w.shape[3]
    more = {"L": w.shape[3], "N": power_of_two(x.shape[0])}
    return launch(decode_kernel, programs, x, w, out, bias, **more, **tile)
