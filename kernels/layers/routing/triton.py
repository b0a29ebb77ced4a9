"""The kernel of a router."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def routing_kernel(
    x, x_row, gain, eps, logits, logits_row, normed, chosen, weights, columns, experts,
    K: tl.constexpr, SCALED: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """normed [n, columns]: x over its root mean square, times `gain`. chosen, weights [n, K]: the
    largest of the softmax of `logits` [n, experts], SCALED to a sum of 1. A program has a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column, expert, n = tl.arange(0, BC), tl.arange(0, BE), tl.arange(0, BK)
    given = tl.load(x + row * x_row + column, mask=column < columns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(given * given, 0) / columns + eps)
    by = tl.load(gain + column, mask=column < columns, other=0.0).to(tl.float32)
    out = (given * scale * by).to(normed.dtype.element_ty)
    tl.store(normed + row * columns + column, out, mask=column < columns)
    left = tl.load(logits + row * logits_row + expert, mask=expert < experts, other=float("-inf"))
    left = tl.exp(left.to(tl.float32) - tl.max(left.to(tl.float32), 0))
    whole, largest, places = tl.sum(left, 0), tl.zeros([BK], tl.float32), tl.zeros([BK], tl.int32)
    for turn in tl.static_range(K):
        best = tl.max(left, 0)
        place = tl.min(tl.where(left == best, expert, experts - 1), 0)
        largest = tl.where(n == turn, best, largest)
        places = tl.where(n == turn, place, places)
        left = tl.where(expert == place, -1.0, left)
    whole = tl.sum(largest, 0) if SCALED else whole
    tl.store(weights + row * K + n, largest / whole, mask=n < K)
    tl.store(chosen + row * K + n, places.to(tl.int64), mask=n < K)
