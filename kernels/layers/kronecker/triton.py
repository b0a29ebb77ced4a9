"""Kronecker-sparse factor in one kernel a factor: one column l, or a dense run of columns, a program.

The product of factor w with ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]`` is a·d dense
products y[:, i, :, l] = x[:, i, :, l] w[i, :, :, l]ᵀ. A program computes one [BN, BB] tile of one
of them; x, w and y are addressed through strides, so both layouts of the batch and every layout
of w are correct. It is fast where the columns of x of one l are contiguous (d = 1), where the
batch is contiguous (batch-last), where w is the traffic (decode), and, with weights from
`variants.densify`, where G consecutive l are one dense block. `grouped.py` has the kernel for the
rest. Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 2.
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
def run_offset(index, D: tl.constexpr, G: tl.constexpr):
    """Feature offset of element `index` of a dense run: runs of G columns, D columns apart."""
    return index if D == G else index // G * D + index % G


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
    G: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_B: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[n, a·b·L] = x[n, a·c·L] Kᵀ with w [a, b, c, L]; b and c count runs of G columns as dense."""
    tiles_b = tl.cdiv(b, BB)
    tile_n, rest = program_tile(tl.cdiv(n, BN), tiles_b * L * a, GROUP_N)
    tile_b, i, run = rest % tiles_b, rest // tiles_b // L, rest // tiles_b % L
    rows = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    js = tile_b * BB + tl.arange(0, BB)
    ks = tl.arange(0, BC)
    D: tl.constexpr = L * G
    x_at = x + far(i * (c * L) + run * G, xf)
    x_at += rows[:, None] * xn + far(run_offset(ks, D, G), xf)[None, :]  # [BN, BC]
    w_at = w + far(i, wa) + far(run, wd) + far(js, wb)[None, :] + far(ks, wc)[:, None]  # [BC, BB]
    x_step = far(tl.full([], BC // G * D, tl.int32), xf)
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
    column = i * (b * L) + run * G + run_offset(js, D, G)
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


def operands(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> tuple[Any, ...]:
    """The arguments that all kernels of one factor share: pointers, sizes and strides in elements."""
    a, b, c, _ = w.shape
    return (x, w, bias, out, x.shape[0], a, b, c, *x.stride(), *out.stride(), *w.stride())


def plain(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    G: int = 1,
    BN: int = 128,
    BB: int = 64,
    BC: int = 64,
    GROUP_N: int = 1,
    precision: str = "ieee",
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """``out = x Kᵀ + bias``, one program for a tile of one l (G = 1) or of one densified run of G.

    Args:
        x: [n, a·c·L], fp32, fp16 or bf16, any strides.
        w: [a, b, c, L] in the dtype of `x`, any strides, fastest where axis c has stride 1. With
            G > 1 the weight of `variants.densify`, whose b and c are G times those of the factor.
        out: [n, a·b·L], any strides; every element is written.
        bias: [a·b·L], contiguous, or None.
        G, BN, BB, BC, GROUP_N: powers of two, G divides BC; tile of batch, outputs, inputs, and
            how many tiles of the batch run side by side on one weight.
        precision: of fp32 products: "ieee", "tf32" or "tf32x3"; without effect in half precision.
    """
    a, b, c, d = w.shape
    grid = (cdiv(x.shape[0], BN) * cdiv(b, BB) * a * d,)
    plain_kernel[grid](
        *operands(x, w, bias, out),
        L=d,
        G=G,
        BN=BN,
        BB=BB,
        BC=BC,
        GROUP_N=GROUP_N,
        EVEN_B=b % BB == 0,
        EVEN_C=c % BC == 0,
        HAS_BIAS=bias is not None,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def decode(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    BB: int = 16,
    BC: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Tensor:
    """`plain` for a few rows without the tensor core; N = n rounded up to a power of two, at most 8.

    Arguments as for `plain`; sums are in fp32 whatever the setting of TF32.
    """
    a, b, c, d = w.shape
    decode_kernel[(cdiv(b, BB) * a * d,)](
        *operands(x, w, bias, out),
        L=d,
        N=power_of_two(x.shape[0]),
        BB=BB,
        BC=BC,
        EVEN_B=b % BB == 0,
        EVEN_C=c % BC == 0,
        HAS_BIAS=bias is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
