"""Attention of one new token a row over a static cache: one kernel, the cache split over programs.

The split that arrives last adds up the others in their order. Derivation: README.md.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MIN_CHUNK = tl.constexpr(32)  # slots of a split at least
FEWEST = tl.constexpr(4)  # splits of the smallest bucket
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def heads_ready(x, head, head_ok, d, D, R, cos, sin, gain, eps, NORM: tl.constexpr):
    """[heads, DP] in float32 of the raw projections `x`, normalized over D if NORM and rotated.

    head: [heads] indices. cos, sin: [DP] of this position, 1 and 0 where nothing turns. Column d
    turns with its partner d ± R/2, which is loaded a second time rather than exchanged.
    """
    partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
    partner = tl.where(d < R, partner, d)
    ok = head_ok[:, None] & (d < D)[None, :]
    value = tl.load(x + head[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    other = tl.load(x + head[:, None] * D + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value *= scale * tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        other *= scale * tl.load(gain + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(d < R // 2, -sin, sin)
    return value * cos[None, :] + other * sign[None, :]


@triton.jit
def cache_tile(cache, slots, stop, d, D):
    """[BN, DP] of one head's cache [L, D], zero from slot `stop` on."""
    mask = (slots < stop)[:, None] & (d < D)[None, :]
    return tl.load(cache + slots[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def scores_of(q, key, DOT: tl.constexpr):
    """[GP, BN] products of queries [GP, DP] with keys [BN, DP] in float32."""
    if DOT:
        return tl.dot(q.to(key.dtype), tl.trans(key), input_precision="ieee")
    return tl.sum(q[:, None, :] * key.to(tl.float32)[None, :, :], 2)


@triton.jit
def weighted(p, value, DOT: tl.constexpr):
    """[GP, DP] sums of values [BN, DP] weighted by p [GP, BN], in float32."""
    if DOT:
        return tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return tl.sum(p[:, :, None] * value.to(tl.float32)[None, :, :], 1)


@triton.jit
def renewed(score, top, total, sums):
    """Maxima, weights of the scores, and totals and sums [GP, VP] shrunk to the new maxima."""
    higher = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    return higher, p, total * shrink + tl.sum(p, 1), sums * shrink[:, None]


@triton.jit
def combine(partial, state, out, first, last, d, D,
            G: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Merge splits first…last, up to MOST of them: sums [splits, G, D] at `partial`, maxima and totals
    [splits, 2, G] at `state`, into out [G, D]. Loads go past the first-level cache."""
    split = first + tl.arange(0, MOST)
    there = split <= last
    for g in tl.static_range(G):
        at = split * (2 * G) + g
        top = tl.load(state + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(state + at + G, mask=there, other=0.0, cache_modifier=".cg")
        factor = tl.exp2(top - tl.max(top, 0))
        mask = there[:, None] & (d < D)[None, :]
        rows = partial + (split * G + g)[:, None] * D + d[None, :]
        rows = tl.load(rows, mask=mask, other=0.0, cache_modifier=".cg")
        merged = tl.sum(rows * factor[:, None], 0) / tl.sum(total * factor, 0)
        tl.store(out + g * D + d, merged.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def finish(
    sums, top, total, out, partial, state, counter, group, split, first, last, d, D,
    G: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store what a split has of a head: its sums [GP, DP] over their totals, or, of several splits, all
    of it for the one that arrives last, which merges them."""
    real = group < G
    mask = real[:, None] & (d < D)[None, :]
    at = group[:, None] * D + d[None, :]
    if first == last:
        sums = sums / total[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + split * G * D + at, sums, mask=mask)
        tl.store(state + split * 2 * G + group, top, mask=real)
        tl.store(state + split * 2 * G + G + group, total, mask=real)
        tl.debug_barrier()  # all stores of the program before its one arrival
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == last - first:
            tl.store(counter, 0)
            # By the code for as many as there are: so their order is the same whatever SPLITS is
            if last - first < FEWEST:
                combine(partial, state, out, first, last, d, D, G, FEWEST)
            for level in tl.static_range(3, 7):
                if (1 << level) <= SPLITS:  # noqa: SIM102 (known when compiled)
                    if (last - first >= (1 << level) // 2) & (last - first < (1 << level)):
                        combine(partial, state, out, first, last, d, D, G, 1 << level)


@triton.jit
def stretch(here, zero, split, splits, window, chunk, BN: tl.constexpr, WINDOW: tl.constexpr):
    """(begin, stop, first, last) of the token at slot `here` of a row that starts at slot `zero`:
    the slots that a split of `chunk` slots sees, and the splits that see any. With a chunk of 0 the
    slots that the token sees are shared out evenly, in whole tiles of BN, over as many of `splits` as
    there are tiles for, and as the bucket of `here` has: none is idle, and sums are the same, however
    far the bucket goes."""
    lowest = zero
    if WINDOW:
        lowest = tl.maximum(zero, here - window + 1)
    above = here | (here >> 1)
    above |= above >> 2
    above |= above >> 4
    above |= above >> 8
    above |= above >> 16
    splits = tl.minimum(splits, tl.maximum((above + 1) // MIN_CHUNK, FEWEST))
    even = tl.cdiv(tl.cdiv(here + 1 - lowest, splits), BN) * BN
    size = tl.where(chunk == 0, even, chunk)
    origin = tl.where(chunk == 0, lowest, 0)
    begin = tl.maximum(lowest, origin + split * size)
    stop = tl.minimum(here + 1, origin + (split + 1) * size)
    return begin, stop, (lowest - origin) // size, (here - origin) // size


@triton.jit
def rotation(cos, sin, turn, d, R):
    """cos and sin [DP] from `turn` on, 1 and 0 where nothing turns."""
    c = tl.load(cos + turn + d, mask=d < R, other=1.0)
    return c, tl.load(sin + turn + d, mask=d < R, other=0.0)


@triton.jit
def before_slots(sinks, at, counted, GP: tl.constexpr):
    """Maxima and totals [GP] of heads before they see a slot: those of their sinks in the one split
    where these are `counted`, else of nothing."""
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    if sinks is not None:
        top = tl.where(counted, tl.load(sinks + at).to(tl.float32) * LOG2_E, top)
        total = tl.where(counted, total + 1, total)
    return top, total


@triton.jit
def attention_kernel(
    qkv, qkv_row, k, v, cache_row, cache_head, cos, sin, table_row, q_gain, k_gain, sinks, eps,
    pos, start, scale, out, out_row, partial, state, counter,
    kv_heads, sequences, D, R, window, chunk,
    G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `reference.decode_attention`. Grid (rows · kv_heads, up to SPLITS); split s has the slots that
    `stretch` gives it; `scale` includes log2 e. Row r reads and writes the cache of r modulo
    `sequences`."""
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
    base = (row % sequences).to(tl.int64) * cache_row + head.to(tl.int64) * cache_head
    k += base
    v += base
    lane = tl.arange(0, BN)
    slots = begin + lane
    key = cache_tile(k, slots, tl.minimum(stop, here), d, D)
    value = cache_tile(v, slots, tl.minimum(stop, here), d, D)
    c, s = rotation(cos, sin, (here - zero).to(tl.int64) * table_row, d, R)
    if PDL:
        gdc_wait()
    qkv += row.to(tl.int64) * qkv_row
    out += row.to(tl.int64) * out_row
    partial += tl.program_id(0).to(tl.int64) * SPLITS * G * D
    state += tl.program_id(0) * SPLITS * 2 * G
    counter += tl.program_id(0)
    group = tl.arange(0, GP)
    one = tl.arange(0, 1)
    q = heads_ready(qkv, head * G + group, group < G, d, D, R, c, s, q_gain, eps, NORM) * scale
    keys = qkv + kv_heads * G * D
    new_k = heads_ready(keys, head + one, one < 1, d, D, R, c, s, k_gain, eps, NORM)
    values = keys + (kv_heads + head + one[:, None]) * D + d[None, :]
    new_v = tl.load(values, mask=(d < D)[None, :], other=0.0)
    new_k = new_k.to(k.dtype.element_ty)
    new_v = new_v.to(v.dtype.element_ty)
    if split == last:
        at = here * D + one[:, None] + d[None, :]
        tl.store(k + at, new_k, mask=(d < D)[None, :])
        tl.store(v + at, new_v, mask=(d < D)[None, :])
    top, total = before_slots(sinks, head * G + tl.minimum(group, G - 1), split == last, GP)
    sums = tl.zeros([GP, DP], tl.float32)
    for tile in range(begin, stop, BN):
        slots = tile + lane
        next_key = cache_tile(k, slots + BN, tl.minimum(stop, here), d, D)
        next_value = cache_tile(v, slots + BN, tl.minimum(stop, here), d, D)
        new = (slots == here)[:, None]
        key = tl.where(new, new_k, key)
        value = tl.where(new, new_v, value)
        score = tl.where((slots < stop)[None, :], scores_of(q, key, DOT), float("-inf"))
        top, p, total, sums = renewed(score, top, total, sums)
        sums += weighted(p, value, DOT)
        key = next_key
        value = next_value
    out += head * G * D
    finish(sums, top, total, out, partial, state, counter, group, split, first, last, d, D, G, SPLITS)
