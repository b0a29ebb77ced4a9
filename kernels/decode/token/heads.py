"""Attention of one token: a program computes a part of a head."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blr.kernels.decode.token.sums import number, wait_for

LOW = gl.constexpr(-1e30)
NUMBERS = gl.constexpr(4096)  # of keys, and of values, at once


@gluon.jit
def turned(sums, bias, gain, d, cos, sin, eps, T: gl.constexpr):
    """[D]: a head's query or key, biased, normed, rotated."""
    other = (d + T.D // 2) % T.D
    a, b = number(sums + d), number(sums + other)
    if T.BIAS:
        a += gl.load(bias + d)
        b += gl.load(bias + other)
    if T.NORMED:
        factor = gl.rsqrt(gl.sum(a * a, 0) / T.D + eps)
        a *= factor * gl.load(gain + d)
        b *= factor * gl.load(gain + other)
    return a * cos + b * sin


@gluon.jit
def own(qkv, head, kv, attention, layer, d, cos, sin, T: gl.constexpr):
    """[D] each: the new token's query, times the scale, key and value of a head, from sums at `qkv`."""
    bias, gain, _, _, _, _, _, _, _, _, heads, kv_heads, scale, eps = attention
    bias += layer * (heads + 2 * kv_heads) * T.D
    gain += layer * 2 * T.D
    q = turned(qkv + head * T.D, bias + head * T.D, gain, d, cos, sin, eps, T) * scale
    at = (heads + kv) * T.D
    k = turned(qkv + at, bias + at, gain + T.D, d, cos, sin, eps, T)
    at += kv_heads * T.D
    v = number(qkv + at + d)
    if T.BIAS:
        v += gl.load(bias + at + d)
    return q, k, v


@gluon.jit
def earlier(keys, values, at, k, v, q, first, end, T: gl.constexpr):
    """Slots from `first` to `end`, of which k and v are the first rows. Returns [rows] largest exponents
    and sums of weights, [rows, D] sums of values."""
    D: gl.constexpr = T.D
    BK: gl.constexpr = NUMBERS // D
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    row = gl.arange(0, BK, gl.SliceLayout(1, L))
    most = gl.full([BK], LOW, gl.float32, gl.SliceLayout(1, L))
    total = gl.zeros([BK], gl.float32, gl.SliceLayout(1, L))
    acc = gl.zeros([BK, D], gl.float32, L)
    for b in range(first, end, BK):
        at += BK * D
        inside = gl.expand_dims(b + BK + row < end, 1) & (gl.expand_dims(d, 0) < D)
        next_k = gl.load(keys + at, mask=inside, other=0.0)
        next_v = gl.load(values + at, mask=inside, other=0.0)
        score = gl.sum(k.to(gl.float32) * gl.expand_dims(q, 0), 1)
        score = gl.where(b + row < end, score, LOW)
        m = gl.maximum(most, score)
        old = gl.exp2(most - m)
        p = gl.where(b + row < end, gl.exp2(score - m), 0.0)
        total = total * old + p
        acc = acc * gl.expand_dims(old, 1) + gl.expand_dims(p, 1) * v.to(gl.float32)
        most = m
        k = next_k
        v = next_v
    return most, total, acc


@gluon.jit
def attend(sums, parts, attention, words, wait, T: gl.constexpr):
    """A part of a head's attention: sums that are not divided yet, their largest exponent and the sum of
    weights. Keys and values of earlier tokens are on their way before the wait."""
    D: gl.constexpr = T.D
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    _, _, keys, values, cos, sin, pos, start, context, stride, heads, kv_heads, _, _ = attention
    window, head, split, layer = words[12], words[13], words[14], words[15]
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    row = gl.arange(0, NUMBERS // D, gl.SliceLayout(1, L))
    group = heads // kv_heads
    kv = head // group
    begin = gl.maximum(start, pos - window + 1)
    per = (pos - begin + T.SPLIT) // T.SPLIT
    first = begin + split * per
    end = gl.minimum(first + per, pos)
    base = layer.to(gl.int64) * stride * 128 + kv.to(gl.int64) * context * D
    at = base + gl.expand_dims(first + row, 1) * D + gl.expand_dims(d, 0)
    inside = gl.expand_dims(first + row < end, 1) & (gl.expand_dims(d, 0) < D)
    k = gl.load(keys + at, mask=inside, other=0.0)
    v = gl.load(values + at, mask=inside, other=0.0)
    c = gl.load(cos + (pos - start) * D + d)
    s = gl.load(sin + (pos - start) * D + d)
    s = gl.where(d < D // 2, -s, s)
    wait_for(wait)
    q, new_k, new_v = own(sums + words[4] * 8, head, kv, attention, layer, d, c, s, T)
    new_k, new_v = new_k.to(k.dtype), new_v.to(k.dtype)
    found = earlier(keys, values, at, k, v, q, first, end, T)
    mine = (pos >= first) & (pos < first + per)
    score = gl.where(mine, gl.sum(q * new_k.to(gl.float32), 0), LOW)
    leave(parts, words, found, score, new_v.to(gl.float32), d, mine, T)
    if mine & (head % group == 0):
        gl.store(keys + base + pos * D + d, new_k)
        gl.store(values + base + pos * D + d, new_v)


@gluon.jit
def leave(parts, words, found, score, value, d, mine, T: gl.constexpr):
    """Put what `earlier` found, and the new token's value if it is `mine`, into parts."""
    most, total, acc = found
    m = gl.maximum(gl.max(most, 0), score)
    w = gl.exp2(most - m)
    p = gl.where(mine, gl.exp2(score - m), 0.0)
    y = gl.sum(acc * gl.expand_dims(w, 1), 0) + p * value
    part = words[13] * T.SPLIT + words[14]
    gl.store(parts + words[6] + part * T.D + d, y)
    exponents = parts + words[5] * 8 + part * 2
    gl.store(exponents, m)
    gl.store(exponents + 1, gl.sum(total * w, 0) + p)
