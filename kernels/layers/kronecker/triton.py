"""Kronecker-sparse factors by one kernel: for a few rows, and the weight of dense blocks.

The product of factor w with ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]`` is a·d dense
products y[:, i, :, l] = x[:, i, :, l] w[i, :, :, l]ᵀ. For a few rows w is the traffic, and how x lies
does not matter.
Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 2.
"""

import triton
import triton.language as tl
from torch import Tensor

from blr.kernels.layers.kronecker.permute import cdiv, power_of_two

WASTED = 1.12  # times its columns that a row's tiles may take


@triton.jit
def far(index, stride):
    """index·stride in 64 bits: b·n·r passes 2³¹ at ordinary sizes."""
    return index.to(tl.int64) * stride


@triton.jit
def decode_kernel(
    x, w, bias, y, n, a, b, c, xn, xf, yn, yf, wa, wb, wc, wd, L: tl.constexpr, N: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr, EVEN_B: tl.constexpr, EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y[n, a·b·L] = x[n, a·c·L] Kᵀ with w [a, b, c, L] for n ≤ N rows on CUDA cores: w is read once,
    products are summed over c at the end."""
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
def densify_kernel(w, dense, b, c, wa, wb, wc, wd, D: tl.constexpr, BR: tl.constexpr, BF: tl.constexpr):
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


def decode_tile(a: int, b: int, c: int, d: int) -> dict[str, int]:
    """Tiles for a few rows: enough programs for 132 SMs, else up to 4096 products a step; where columns
    lie side by side (d = 1) few rows of long runs. Measured on one H200."""
    if d == 1 and c >= 512:
        BC = 1024 if cdiv(c, 1024) * 1024 <= WASTED * c else 512
        return {"BB": 2, "BC": BC, "num_warps": BC // 256, "num_stages": 3}
    BC = power_of_two(c, 16, 512)
    BB = power_of_two(a * b * d // 528 + 1, 4, max(4, 4096 // BC))
    return {"BB": BB, "BC": BC, "num_warps": 4, "num_stages": 3}


def decode_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """``out = x Kᵀ + bias`` for up to eight rows without the tensor core, sums in fp32.

    Args:
        x: [n, a·c·d], fp32, fp16 or bf16, any strides, fastest where the features are contiguous.
        w: [a, b, c, d] in the dtype of `x`, any strides, fastest where axis c has stride 1.
        out: [n, a·b·d], any strides; every element is written.
        bias: [a·b·d], contiguous, or None.
    """
    a, b, c, d = w.shape
    tile = decode_tile(a, b, c, d)
    even = {"EVEN_B": b % tile["BB"] == 0, "EVEN_C": c % tile["BC"] == 0, "HAS_BIAS": bias is not None}
    strides = (*x.stride(), *out.stride(), *w.stride())
    grid = (cdiv(b, tile["BB"]) * d * a,)
    sizes = (x.shape[0], a, b, c)
    decode_kernel[grid](x, w, bias, out, *sizes, *strides, L=d, N=power_of_two(len(x)), **even, **tile)
    return out
