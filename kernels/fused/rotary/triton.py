"""Queries and keys rotated by their positions, one kernel that reads both once."""

import triton
import triton.language as tl


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
