"""All layers of one token in one kernel: a program a multiprocessor, one warp that copies weights, eight that multiply.

Work is a table: for each phase of a layer and each program a row of words (`tables.py`), A phase
begins when all programs have ended the one before (a counter in memory); its weights are on their way before that. Results
are sums of integers of 2^-32, so that they do not depend on who comes first.

Triton 3.6 loses a value that a loop carries and that only bounds an inner loop: the copying warp loads its words anew.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blr.kernels.decode.token.shims import copy_tile, seen_as, thread_barrier

WORDS = gl.constexpr(20)  # of a table's row
ROWS = gl.constexpr(128)  # of a tile, and its columns
WARPS = gl.constexpr(8)
NORM = gl.constexpr(1)  # flags: the input is normed, gated, put together from parts of attention
GATE = gl.constexpr(2)
PARTS = gl.constexpr(4)
LOW = gl.constexpr(-1e30)
ONE = gl.constexpr(4294967296.0)
LARGEST = gl.constexpr(67108864.0)  # of a sum

# Inputs lie in shared memory as the instruction takes them, 32 columns after another: of its columns
# 16 i + 8 h + 2 t + b thread t has those of 8 t + 4 i + 2 h + b, 16 bytes in a row; behind 128 the low parts.
PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [4], [32], [64]], [[8], [16], [0], [0], [128]], [[0], [0], [0]], [], [256]
    )
)
# [column, high or low part, four columns of the instruction]
WIDENED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0, 0], [8, 0, 0], [16, 0, 0], [32, 0, 0], [64, 0, 0]],
        [[2, 0, 0], [4, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [],
        [128, 2, 4],
    )
)


@gluon.jit
def clock():
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(counter, target, state, step):
    """Until `target` programs have arrived. One thread looks; after 1024 · state[0] times it gives up, for all that follow
    too, and leaves the step's number and one."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred q;
        .reg .b32 v, n, rounds, most;
        mov.u32 $0, 0;
        mov.u32 v, %tid.x;
        setp.ne.u32 q, v, 0;
        @q bra done;
        mov.u32 rounds, 0;
        more:
        mov.u32 n, 1024;
        look:
        ld.acquire.gpu.global.b32 v, [$1];
        sub.s32 v, v, $2;
        setp.ge.s32 q, v, 0;
        @q bra done;
        sub.s32 n, n, 1;
        setp.gt.s32 q, n, 0;
        @q bra look;
        add.s32 rounds, rounds, 1;
        ld.volatile.global.b32 most, [$3];
        setp.lt.s32 q, rounds, most;
        @q bra more;
        setp.eq.s32 q, most, 0;
        @q bra done;
        st.volatile.global.b32 [$3], 0;
        st.volatile.global.b32 [$3+4], 1;
        st.volatile.global.b32 [$4], $5;
        done:
        }""",
        "=r,l,r,l,l,r",
        [counter, target, state, state + 2 + gl.program_id(0), step + 1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    thread_barrier()


@gluon.jit
def number(pointer, mask=None):
    """Sums, or plain numbers, in float32."""
    if mask is None:
        v = gl.load(pointer, cache_modifier=".cg")
    else:
        v = gl.load(pointer, mask=mask, other=0, cache_modifier=".cg")
    return v.to(gl.float32) * (1 / ONE) if v.dtype == gl.int64 else v


@gluon.jit
def operand(inputs, slot, ZERO, RHS: gl.constexpr):
    """[128, 8]: the inputs of a tile, high parts in four columns and low parts in four."""
    v = gl.permute(gl.reshape(inputs.index(slot).load(PLACES), [2, 4, 4, 2, 2, 2]), (1, 3, 4, 2, 5, 0))
    v = gl.convert_layout(gl.reshape(v, [128, 2]), gl.SliceLayout(2, WIDENED), assert_trivial=True)
    b, _ = gl.broadcast(gl.expand_dims(v, 2), ZERO)
    return gl.convert_layout(gl.reshape(b, [128, 8]), RHS, assert_trivial=True)


@gluon.jit
def place(a):
    """[rows, 128] in the order of `PLACES`."""
    return gl.reshape(gl.permute(gl.reshape(a, [a.shape[0], 4, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5)), a.shape)


@gluon.jit
def stage(inputs, sums, parts, gains, gain, xo, xu, kc, nK, K, nx, flags, D: gl.constexpr, SPLIT: gl.constexpr,
          NR: gl.constexpr):  # fmt: skip
    """Inputs of nx chunks of 128 columns from chunk kc on, which begins again behind chunk nK, in two half-precision parts.
    The last chunk ends with the row: what others have of it is zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    HALF: gl.constexpr = inputs.dtype
    row = gl.arange(0, NR, gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    for i0 in range(0, nx, NR):
        k = kc + i0 + row
        k = gl.expand_dims(gl.where(k >= nK, k - nK, k), 1)
        at = gl.minimum(k * 128, K - 128) + c
        inside = gl.expand_dims(i0 + row < nx, 1) & (at >= k * 128)
        if flags & PARTS:
            head = (gl.where(gl.expand_dims(i0 + row < nx, 1), k, 0) * 128 + (c if D < 128 else 0)) // D * SPLIT
            lane = c % D
            m0 = gl.load(parts + xu + head * 2, cache_modifier=".cg")
            n0 = gl.load(parts + xu + head * 2 + 1, cache_modifier=".cg")
            a = gl.load(parts + xo + head * D + lane, mask=inside, other=0.0, cache_modifier=".cg")
            for s in gl.static_range(1, SPLIT):
                m = gl.load(parts + xu + (head + s) * 2, cache_modifier=".cg")
                n = gl.load(parts + xu + (head + s) * 2 + 1, cache_modifier=".cg")
                part = gl.load(parts + xo + (head + s) * D + lane, mask=inside, other=0.0, cache_modifier=".cg")
                most = gl.maximum(m0, m)
                old = gl.exp2(m0 - most)
                new = gl.exp2(m - most)
                n0 = n0 * old + n * new
                a = a * old + part * new
                m0 = most
            a = a / n0
        else:
            a = number(sums + xo + at, inside)
            if flags & NORM:
                a *= gl.load(gains + gain + at, mask=inside, other=0.0)
            if flags & GATE:
                a = a / (1 + gl.exp(-a)) * number(sums + xu + at, inside)
        h = a.to(HALF)
        inputs.index(i0 // NR).slice(0, 128, dim=1).store(place(h))
        inputs.index(i0 // NR).slice(128, 128, dim=1).store(place((a - h.to(gl.float32)).to(HALF)))


@gluon.jit
def turned(sums, bias, gain, d, cos, sin, eps, D: gl.constexpr, BIAS: gl.constexpr, NORMED: gl.constexpr):
    """A head's query or key: biased, normed, rotated."""
    a = number(sums + d)
    b = number(sums + (d + D // 2) % D)
    if BIAS:
        a += gl.load(bias + d)
        b += gl.load(bias + (d + D // 2) % D)
    if NORMED:
        factor = gl.rsqrt(gl.sum(a * a, 0) / D + eps)
        a *= factor * gl.load(gain + d)
        b *= factor * gl.load(gain + (d + D // 2) % D)
    return a * cos + b * sin


@gluon.jit
def attend(sums, parts, bias, gain, keys, values, cos, sin, pos, start, window, context, xo, yo, mo, head, split, heads,
           kv_heads, scale, eps, counter, target, state, step, D: gl.constexpr, SPLIT: gl.constexpr, BK: gl.constexpr,
           BIAS: gl.constexpr, NORMED: gl.constexpr):  # fmt: skip
    """A part of a head's attention: sums that are not divided yet, their largest exponent and the sum of weights. Keys of
    earlier tokens are on their way before the wait. keys, values: of the layer."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    row = gl.arange(0, BK, gl.SliceLayout(1, L))
    kv = head // (heads // kv_heads)
    begin = gl.maximum(start, pos - window + 1)
    per = (pos - begin + SPLIT) // SPLIT
    first = begin + split * per
    end = gl.minimum(first + per, pos)
    base = kv.to(gl.int64) * context * D
    at = base + gl.expand_dims(first + row, 1) * D + gl.expand_dims(d, 0)
    inside = gl.expand_dims(first + row < end, 1) & (gl.expand_dims(d, 0) < D)
    k = gl.load(keys + at, mask=inside, other=0.0)
    v = gl.load(values + at, mask=inside, other=0.0)
    c = gl.load(cos + (pos - start) * D + d)
    s = gl.load(sin + (pos - start) * D + d)
    s = gl.where(d < D // 2, -s, s)
    wait_for(counter, target, state, step)
    q = turned(sums + xo + head * D, bias + head * D, gain, d, c, s, eps, D, BIAS, NORMED) * scale
    own = (heads + kv) * D
    k0 = turned(sums + xo + own, bias + own, gain + D, d, c, s, eps, D, BIAS, NORMED).to(k.dtype)
    v0 = number(sums + xo + own + kv_heads * D + d)
    if BIAS:
        v0 += gl.load(bias + own + kv_heads * D + d)
    v0 = v0.to(k.dtype)
    most = gl.full([BK], LOW, gl.float32, gl.SliceLayout(1, L))
    total = gl.zeros([BK], gl.float32, gl.SliceLayout(1, L))
    acc = gl.zeros([BK, D], gl.float32, L)
    for b in range(first, end, BK):
        at += BK * D
        inside = gl.expand_dims(b + BK + row < end, 1) & (gl.expand_dims(d, 0) < D)
        next_k = gl.load(keys + at, mask=inside, other=0.0)
        next_v = gl.load(values + at, mask=inside, other=0.0)
        score = gl.where(b + row < end, gl.sum(k.to(gl.float32) * gl.expand_dims(q, 0), 1), LOW)
        m = gl.maximum(most, score)
        old = gl.exp2(most - m)
        p = gl.where(b + row < end, gl.exp2(score - m), 0.0)
        total = total * old + p
        acc = acc * gl.expand_dims(old, 1) + gl.expand_dims(p, 1) * v.to(gl.float32)
        most = m
        k = next_k
        v = next_v
    mine = (pos >= first) & (pos < first + per)
    score = gl.where(mine, gl.sum(q * k0.to(gl.float32), 0), LOW)
    m = gl.maximum(gl.max(most, 0), score)
    w = gl.exp2(most - m)
    p = gl.where(mine, gl.exp2(score - m), 0.0)
    y = gl.sum(acc * gl.expand_dims(w, 1), 0) + p * v0.to(gl.float32)
    part = head * SPLIT + split
    gl.store(parts + yo + part * D + d, y)
    gl.store(parts + mo + part * 2, m)
    gl.store(parts + mo + part * 2 + 1, gl.sum(total * w, 0) + p)
    if mine:
        if head % (heads // kv_heads) == 0:
            new = base + pos * D
            gl.store(keys + new + d, k0)
            gl.store(values + new + d, v0)


@gluon.jit
def consume(ring, full, empty, begun, inputs, table, x, sums, parts, gains, bias, head_gains, keys, values, cos, sin, position,
            starts, counter, state, clocks, first, last, steps, programs, context, layer_stride, heads, kv_heads,
            scale, eps, head_eps, NS: gl.constexpr, HIDDEN: gl.constexpr, WIDE: gl.constexpr, D: gl.constexpr,
            SPLIT: gl.constexpr, BK: gl.constexpr, NR: gl.constexpr, BIAS: gl.constexpr, NORMED: gl.constexpr, CLOCK: gl.constexpr):  # fmt: skip
    pid = gl.program_id(0)
    HALF: gl.constexpr = ring.dtype
    FIXED: gl.constexpr = sums.dtype.element_ty == gl.int64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RHS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LN: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    zero = gl.zeros([128, 2, 4], HALF, WIDENED)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    share = gl.arange(0, 256, L1)
    wide = gl.arange(0, WIDE, LN)
    by_row = seen_as(inputs, [inputs.shape[0] * NR, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pos = gl.load(position).to(gl.int32)
    start = gl.load(starts).to(gl.int32)
    per = (HIDDEN + programs - 1) // programs
    mine = pid * per + share
    h_mask = (share < per) & (mine < HIDDEN)
    begin = 0
    if first == 0:  # the residual stream and what the first phase adds to
        h = gl.load(x + mine, mask=h_mask, other=0.0)
        d = table + pid * WORDS
        if FIXED:
            bad = ((h > -LARGEST) & (h < LARGEST)) == 0
            gl.store(state + 1 + share * 0, 1, mask=h_mask & bad)
            gl.store(sums + mine, gl.where(bad, 0.0, h * ONE).to(gl.int64), mask=h_mask)
        else:
            gl.store(sums + mine, h, mask=h_mask)
        gl.store(sums + gl.load(d + 9) + share, gl.zeros([256], sums.dtype.element_ty, L1), mask=share < gl.load(d + 10))
        thread_barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        begin = 1
    d = table + ((first + 1) * programs + pid) * WORDS
    n = gl.load(d)
    kc = gl.load(d + 1)
    nK = gl.load(d + 2)
    K = gl.load(d + 3) * 8
    xo = gl.load(d + 4) * 16
    xu = gl.load(d + 5) * 16
    yo = gl.load(d + 6)
    row = gl.load(d + 7)
    R = gl.load(d + 8)
    zo = gl.load(d + 9)
    zn = gl.load(d + 10)
    flags = gl.load(d + 11)
    gain = gl.load(d + 12)
    head = gl.load(d + 13)
    split = gl.load(d + 14)
    layer = gl.load(d + 15)
    s = 0
    parity = 0
    for it in range(first, last):
        # what the next step is, on its way meanwhile
        d = table + (gl.minimum(it + 2, steps) * programs + pid) * WORDS
        n_ = gl.load(d)
        kc_ = gl.load(d + 1)
        nK_ = gl.load(d + 2)
        K_ = gl.load(d + 3)
        xo_ = gl.load(d + 4)
        xu_ = gl.load(d + 5)
        yo_ = gl.load(d + 6)
        row_ = gl.load(d + 7)
        R_ = gl.load(d + 8)
        zo_ = gl.load(d + 9)
        zn_ = gl.load(d + 10)
        flags_ = gl.load(d + 11)
        gain_ = gl.load(d + 12)
        head_ = gl.load(d + 13)
        split_ = gl.load(d + 14)
        layer_ = gl.load(d + 15)
        target = (it - first + begin) * programs
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4, clock())
        if head >= 0:
            cache = layer.to(gl.int64) * layer_stride * 128
            attend(sums, parts, bias + layer * (heads + 2 * kv_heads) * D, head_gains + layer * 2 * D, keys + cache, values + cache,
                   cos, sin, pos, start, gain, context, xo, yo, xu, head, split, heads, kv_heads, scale, head_eps,
                   counter, target, state, it, D, SPLIT, BK, BIAS, NORMED)  # fmt: skip
        else:
            wait_for(counter, target, state, it)
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 1, clock())
        factor = 1.0
        nx = gl.minimum(n, nK)
        h = number(sums + wide, (wide < HIDDEN) & ((flags & NORM) != 0))
        stage(inputs, sums, parts, gains, gain * HIDDEN, xo, xu, kc, nK, K, nx, flags, D, SPLIT, NR)
        if flags & NORM:  # a product is linear
            factor = gl.rsqrt(gl.sum(h * h, 0) / HIDDEN + eps)
        begun.store(gl.full([1], it, gl.int32, L1))
        thread_barrier()
        # results of the next phase are sums; the last that read them ended long ago
        gl.store(sums + zo + share, gl.zeros([256], sums.dtype.element_ty, L1), mask=share < zn)
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 2, clock())
        a = gl.zeros([ROWS, 8], gl.float32, MMA)
        slot = 0
        for j in range(n):
            mbarrier.wait(full.index(s), parity)
            w = ring.index(s).load(LHS)
            a = mma_v2(w, operand(by_row, slot, zero, RHS), a)
            mbarrier.arrive(empty.index(s), count=1)
            s += 1
            if s == NS:
                s = 0
                parity = parity ^ 1
            slot += 1
            if slot == nx:
                slot = 0
            kc += 1
            if (kc == nK) | (j == n - 1):
                y = gl.sum(a, 1) * (0.25 * factor)
                at = gl.minimum(row, R - ROWS) + rows
                if FIXED:
                    bad = ((y > -LARGEST) & (y < LARGEST)) == 0
                    gl.store(state + 1 + rows * 0, 1, mask=(at >= row) & bad)
                    y = gl.where(bad, 0.0, y * ONE)
                    gl.atomic_add(sums + yo + at, y.to(gl.int64), mask=at >= row, sem="relaxed", scope="gpu")
                else:
                    gl.atomic_add(sums + yo + at, y, mask=at >= row, sem="relaxed", scope="gpu")
                a = gl.zeros([ROWS, 8], gl.float32, MMA)
                kc = 0
                row += ROWS
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 3, clock())
        thread_barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        n = n_
        kc = kc_
        nK = nK_
        K = K_ * 8
        xo = xo_ * 16
        xu = xu_ * 16
        yo = yo_
        row = row_
        R = R_
        zo = zo_
        zn = zn_
        flags = flags_
        gain = gain_
        head = head_
        split = split_
        layer = layer_
    if last == steps:
        wait_for(counter, (last - first + begin) * programs, state, last)
        h = number(sums + mine, h_mask)
        lost = gl.load(state + 1, volatile=True) + gl.load(state + 2 + pid, volatile=True)
        gl.store(x + mine, gl.where(lost == 0, h, float("nan")), mask=h_mask)
    # the last to leave sets the counters back
    thread_barrier()
    if gl.atomic_add(counter + 32, 1, sem="acq_rel", scope="gpu") == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 32, 0)
        gl.store(state + 1, 0)


@gluon.jit
def produce(ring, full, empty, begun, w0, w1, w2, w3, w4, w5, table, first, last, steps, programs, before,
            after, NS: gl.constexpr):  # fmt: skip
    """Copies tiles; under way are at most `before` while their phase has not begun here, `after` then."""
    pid = gl.program_id(0)
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    s = 0
    parity = 1
    g = 0
    s2 = 0
    parity2 = 0
    s4 = 0
    parity4 = 0
    for it in range(first, last):
        d = table + ((it + 1) * programs + pid) * WORDS
        n = gl.load(d)
        k = gl.load(d + 1)
        nK = gl.load(d + 2)
        K = gl.load(d + 3) * 8
        row = gl.load(d + 7)
        R = gl.load(d + 8)
        which = gl.load(d + 16)
        r0 = gl.load(d + 17)
        c0 = gl.load(d + 18)
        for j in range(n):
            mbarrier.wait(empty.index(s), parity)
            if g >= after:
                mbarrier.wait(full.index(s4), parity4)
                s4 += 1
                if s4 == NS:
                    s4 = 0
                    parity4 = parity4 ^ 1
            if g >= before:
                if gl.max(begun.load(L1), 0) < it:
                    mbarrier.wait(full.index(s2), parity2)
                s2 += 1
                if s2 == NS:
                    s2 = 0
                    parity2 = parity2 ^ 1
            # tiles end with their matrix
            r = r0 + gl.minimum(row, R - ROWS)
            c = c0 + gl.minimum(k * 128, K - 128)
            mbarrier.expect(full.index(s), 32768)
            if which < 2:
                if which == 0:
                    copy_tile(w0, [r, c], full.index(s), ring.index(s))
                else:
                    copy_tile(w1, [r, c], full.index(s), ring.index(s))
            else:
                if which < 4:
                    if which == 2:
                        copy_tile(w2, [r, c], full.index(s), ring.index(s))
                    else:
                        copy_tile(w3, [r, c], full.index(s), ring.index(s))
                else:
                    if which == 4:
                        copy_tile(w4, [r, c], full.index(s), ring.index(s))
                    else:
                        copy_tile(w5, [r, c], full.index(s), ring.index(s))
            g += 1
            s += 1
            if s == NS:
                s = 0
                parity = parity ^ 1
            k += 1
            if k == nK:
                k = 0
                row += ROWS


@gluon.jit(do_not_specialize=["first", "last", "steps", "programs", "context", "layer_stride", "heads",
                              "kv_heads", "before", "after"])  # fmt: skip
def token_kernel(w0, w1, w2, w3, w4, w5, table, x, sums, parts, gains, bias, head_gains, keys, values, cos, sin, position,
                 starts, counter, state, clocks, first, last, steps, programs, context, layer_stride, heads,
                 kv_heads, before, after, scale, eps, head_eps, NS: gl.constexpr, NX: gl.constexpr, HIDDEN: gl.constexpr,
                 WIDE: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr, BK: gl.constexpr, NR: gl.constexpr,
                 BIAS: gl.constexpr, NORMED: gl.constexpr, CLOCK: gl.constexpr):  # fmt: skip
    """Phases `first` to `last` (counted through all layers) of a token.

    x: [hidden] in float32, in and out. NS: tiles in the ring. NX: times NR chunks of inputs are what a program has in a step
    at most. counter: [64], zeros. state: [2 + programs]: how often to look at the counter, whether a number was not finite
    or too large, codes of programs that waited in vain."""
    ring = gl.allocate_shared_memory(keys.dtype.element_ty, [NS, ROWS, 128], w0.layout)
    inputs = gl.allocate_shared_memory(keys.dtype.element_ty, [NX, NR, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begun.store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    for i in gl.static_range(NS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (ring, full, empty, begun, inputs, table, x, sums, parts, gains, bias, head_gains, keys, values, cos, sin,
                       position, starts, counter, state, clocks, first, last, steps, programs, context, layer_stride,
                       heads, kv_heads, scale, eps, head_eps, NS, HIDDEN, WIDE, D, SPLIT, BK, NR, BIAS, NORMED, CLOCK)),
            (produce, (ring, full, empty, begun, w0, w1, w2, w3, w4, w5, table, first, last, steps, programs,
                       before, after, NS)),
        ],
        [1],
        [24],
    )  # fmt: skip
