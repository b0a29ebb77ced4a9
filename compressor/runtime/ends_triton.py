"""The two ends of a token as kernels: the row of the embedding, and the choice of the next token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed_kernel(tokens, table, table_row, x, x_row, width, BLOCK: tl.constexpr):
    """x[b] = table[tokens[b]] in float32. Grid (rows, ceil(width / BLOCK)). Launched without
    programmatic dependence: it starts when everything before it has ended."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(table + token * table_row + at, mask=at < width, other=0.0)
    tl.store(x + row * x_row + at, value.to(tl.float32), mask=at < width)


@triton.jit
def choose_kernel(
    logits, logits_row, vocabulary, values, indices, counter, tokens, pos,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tokens[b] = the lowest index of the largest logit; pos[b] += 1. Grid (rows, parts ≤ PARTS).

    The part that arrives last compares what the others left in values, indices [rows, PARTS];
    counter: [rows] zeros, left as zeros.
    """
    if PDL:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    logits += tl.cast(row, tl.int64) * logits_row
    value = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
    top = tl.max(value, 0)
    index = tl.min(tl.where(value == top, at, vocabulary - 1), 0)
    tl.store(values + row * PARTS + part, top)
    tl.store(indices + row * PARTS + part, index)
    tl.debug_barrier()  # both stores before the arrival
    arrived = tl.atomic_add(counter + row, 1, sem="acq_rel")
    if arrived == parts - 1:
        tl.store(counter + row, 0)
        lane = tl.arange(0, PARTS)
        there = lane < parts
        lane += row * PARTS
        best = tl.load(values + lane, mask=there, other=float("-inf"), cache_modifier=".cg")
        where = tl.load(indices + lane, mask=there, other=0, cache_modifier=".cg")
        chosen = tl.min(tl.where(there & (best == tl.max(best, 0)), where, vocabulary - 1), 0)
        tl.store(tokens + row, tl.minimum(chosen, vocabulary - 1).to(tl.int64))
        tl.store(pos + row, tl.load(pos + row) + 1)
