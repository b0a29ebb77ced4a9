"""KL divergence of rows of logits and its gradient, where each logit is read twice.

A program has one row. It takes in blocks what both softmaxes and the divergence need, rescaled when a
larger logit comes (online softmax, arXiv 1805.02867); then it writes q − p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
LEAST = tl.constexpr(-3.4e38)  # finite: of the difference of two infinities nothing is known


@triton.jit
def divergence_kernel(student, teacher, lost, gradient, width, BLOCK: tl.constexpr):
    """lost [n] = Σ p (log p − log q) in float32 and gradient [n, width] = q − p, for logits
    [n, width] of contiguous rows. Grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    ours, theirs, out = student + row * width, teacher + row * width, gradient + row * width
    column = tl.arange(0, BLOCK)
    low = -float("inf")
    top_s = tl.full((), LEAST, tl.float32)
    top_t = tl.full((), LEAST, tl.float32)
    sum_s = tl.zeros((), tl.float32)
    sum_t = tl.zeros((), tl.float32)
    gap = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        there = start + column < width
        s = tl.load(ours + start + column, mask=there, other=low).to(tl.float32)
        t = tl.load(theirs + start + column, mask=there, other=low).to(tl.float32)
        new_s = tl.maximum(top_s, tl.max(s, 0))
        new_t = tl.maximum(top_t, tl.max(t, 0))
        sum_s = sum_s * tl.exp(top_s - new_s) + tl.sum(tl.exp(s - new_s), 0)
        weight = tl.exp(t - new_t)
        rescale = tl.exp(top_t - new_t)
        sum_t = sum_t * rescale + tl.sum(weight, 0)
        gap = gap * rescale + tl.sum(tl.where(weight > 0, weight * (t - s), 0.0), 0)
        top_s = new_s
        top_t = new_t
    log_s = top_s + tl.log(sum_s)
    log_t = top_t + tl.log(sum_t)
    tl.store(lost + row, gap / sum_t - log_t + log_s)
    for start in range(0, width, BLOCK):
        there = start + column < width
        s = tl.load(ours + start + column, mask=there, other=low).to(tl.float32)
        t = tl.load(theirs + start + column, mask=there, other=low).to(tl.float32)
        tl.store(out + start + column, tl.exp(s - log_s) - tl.exp(t - log_t), mask=there)


def divergence(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ student) of every row in nats, float32 [n], and its gradient in the student's logits
    [n, v], of their dtype. Both [n, v]."""
    student, teacher = student.contiguous(), teacher.contiguous()
    rows, width = student.shape
    lost = torch.empty(rows, dtype=torch.float32, device=student.device)
    gradient = torch.empty_like(student)
    if rows:
        divergence_kernel[(rows,)](student, teacher, lost, gradient, width, BLOCK=BLOCK, num_warps=WARPS)
    return lost, gradient
