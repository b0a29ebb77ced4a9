"""Rotations, gates and layer norms, one kernel each, which memory alone bounds."""

import triton
import triton.language as tl

from blr.kernels.fp8.triton import activated, tanh


@triton.jit
def rotate_heads(x, y, c0, c1, s0, s1, H, x_head, y_head, HALF: tl.constexpr, HEADS: tl.constexpr):
    """y of the heads [H, D] of one token; c0 … s1: [D / 2] of cosine and sine, of either half."""
    lane = tl.arange(0, c0.shape[0])[None, :]
    for begin in tl.range(0, H, HEADS):
        head = begin + tl.arange(0, HEADS)[:, None]
        ok = (head < H) & (lane < HALF)
        at = x + head * x_head + lane
        first = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
        to = y + head * y_head + lane
        tl.store(to, (first * c0[None, :] - second * s0[None, :]).to(y.dtype.element_ty), mask=ok)
        tl.store(to + HALF, (second * c1[None, :] + first * s1[None, :]).to(y.dtype.element_ty), mask=ok)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, H, K,
    q_row, q_token, q_head, k_row, k_token, k_head, c_row, c_token,
    q_out_row, q_out_token, q_out_head, k_out_row, k_out_token, k_out_head,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """H heads of queries and K of keys of one token of one sequence. BACK: their gradients instead, of
    those of what was made of them."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = row * c_row + token * c_token + lane
    c0 = tl.load(cos + at, mask=lane < HALF, other=0.0).to(tl.float32)
    c1 = tl.load(cos + at + HALF, mask=lane < HALF, other=0.0).to(tl.float32)
    s0 = tl.load(sin + at, mask=lane < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin + at + HALF, mask=lane < HALF, other=0.0).to(tl.float32)
    if BACK:  # the transposed matrix of every pair: halves may differ
        turned = -s0
        s0 = -s1
        s1 = turned
    x, y = q + row * q_row + token * q_token, q_out + row * q_out_row + token * q_out_token
    rotate_heads(x, y, c0, c1, s0, s1, H, q_head, q_out_head, HALF, HEADS)
    x, y = k + row * k_row + token * k_token, k_out + row * k_out_row + token * k_out_token
    rotate_heads(x, y, c0, c1, s0, s1, K, k_head, k_out_head, HALF, HEADS)


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


@triton.jit
def gated_back_kernel(
    gate, up, g, gate_out, up_out, size, MAKE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradients of gate and up [size] from g [size], that of ``activation(gate) ⊙ up``; activation and
    slope are computed again."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    v = tl.load(gate + lane, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(up + lane, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(g + lane, mask=inside, other=0.0).to(tl.float32)
    if MAKE == "swiglu":
        part = tl.sigmoid(v)
        slope = part * (1.0 + v * (1.0 - part))
    else:
        tl.static_assert(MAKE == "geglu")
        turned = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))
        part = 0.5 * (1.0 + turned)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * v * v)
        slope = part + 0.5 * v * (1.0 - turned * turned) * inner
    tl.store(gate_out + lane, (given * beside * slope).to(gate_out.dtype.element_ty), mask=inside)
    tl.store(up_out + lane, (given * v * part).to(up_out.dtype.element_ty), mask=inside)


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
