"""Attention of one new token a row over a static cache in int8.

Tiles stream through shared memory several ahead; the new token, which is in none, is met last.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.attention.triton import (
    before_slots,
    finish,
    heads_ready,
    renewed,
    rotation,
    scores_of,
    stretch,
    weighted,
)

LARGEST = tl.constexpr(127.0)
TINY = tl.constexpr(1e-30)


@triton.jit
def packed(x):
    """[1, DP] in float32 as whole numbers from -127 to 127, and their scale [1]."""
    scale = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, TINY)
    whole = x / scale[:, None]
    return tl.floor(tl.abs(whole) + 0.5) * tl.where(whole < 0, -1.0, 1.0), scale


@triton.jit
def stored(x, cache, scales, here, d, D):
    """Put x [1, DP] into slot `here` of a head's cache; what was put there, in float32."""
    x, scale = packed(x)
    tl.store(scales + here + tl.arange(0, 1), scale)
    x = x.to(cache.dtype.element_ty)
    tl.store(cache + here * D + d[None, :], x, mask=(d < D)[None, :])
    return x.to(tl.float32) * scale[:, None]


@triton.jit
def operand(tile, DOT: tl.constexpr, HALF: tl.constexpr):
    """A tile as products take it: int8 becomes exact numbers of 16 bits for the tensor cores."""
    if DOT:
        tile = tile.to(tl.float16) if HALF else tile.to(tl.bfloat16)
    return tile


@triton.jit
def streamed_kernel(
    qkv, qkv_row, k, v, cache_row, cache_head, k_scale, v_scale, scale_row, scale_head,
    cos, sin, table_row, q_gain, k_gain, sinks, eps, pos, start, scale, out, out_row,
    partial, state, counter, kv_heads, sequences, D, R, window, chunk,
    G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Arguments as of `triton.attention_kernel`; k_scale, v_scale: [rows, Hkv, L]."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    here = tl.load(pos + row).to(tl.int32)
    zero = tl.load(start + row).to(tl.int32)
    splits = tl.num_programs(1)
    begin, stop, first, last = stretch(here, zero, split, splits, window, chunk, BN, WINDOW)
    if (split < first) | (split > last):
        return
    d = tl.arange(0, DP)
    lane = tl.arange(0, BN)
    group = tl.arange(0, GP)
    one = tl.arange(0, 1)
    held = row % sequences
    base = held.to(tl.int64) * cache_row + head.to(tl.int64) * cache_head
    k += base
    v += base
    base = held.to(tl.int64) * scale_row + head.to(tl.int64) * scale_head
    k_scale += base
    v_scale += base
    c, s = rotation(cos, sin, (here - zero).to(tl.int64) * table_row, d, R)
    if PDL:
        gdc_wait()
    qkv += row.to(tl.int64) * qkv_row
    q = heads_ready(qkv, head * G + group, group < G, d, D, R, c, s, q_gain, eps, NORM) * scale
    if DOT:
        q = operand(q, DOT, HALF)
    top, total = before_slots(sinks, head * G + tl.minimum(group, G - 1), split == last, GP)
    sums = tl.zeros([GP, DP], tl.float32)
    old = tl.minimum(stop, here)
    for tile in tl.range(begin, old, BN, num_stages=STAGES):
        slots = tile + lane
        ok = slots < old
        mask = ok[:, None] & (d < D)[None, :]
        at = slots[:, None] * D + d[None, :]
        key = operand(tl.load(k + at, mask=mask, other=0), DOT, HALF)
        score = scores_of(q, key, DOT)
        score *= tl.load(k_scale + slots, mask=ok, other=0.0)[None, :]
        score = tl.where(ok[None, :], score, float("-inf"))
        top, p, total, sums = renewed(score, top, total, sums)
        p *= tl.load(v_scale + slots, mask=ok, other=0.0)[None, :]
        value = operand(tl.load(v + at, mask=mask, other=0), DOT, HALF)
        sums += weighted(p, value, DOT)
    if split == last:
        keys = qkv + kv_heads * G * D
        new_k = heads_ready(keys, head + one, one < 1, d, D, R, c, s, k_gain, eps, NORM)
        new_k = stored(new_k, k, k_scale, here, d, D)
        values = keys + (kv_heads + head + one[:, None]) * D + d[None, :]
        new_v = tl.load(values, mask=(d < D)[None, :], other=0.0).to(tl.float32)
        new_v = stored(new_v, v, v_scale, here, d, D)
        score = tl.sum(q.to(tl.float32) * new_k, 1)[:, None]
        top, p, total, sums = renewed(score, top, total, sums)
        sums += p * new_v
    out += row.to(tl.int64) * out_row + head * G * D
    partial += tl.program_id(0).to(tl.int64) * SPLITS * G * D
    state += tl.program_id(0) * SPLITS * 2 * G
    counter += tl.program_id(0)
    finish(sums, top, total, out, partial, state, counter, group, split, first, last, d, D, G, SPLITS)
