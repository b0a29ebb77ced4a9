"""A whole token of a Llama in one kernel: a program a multiprocessor, one warp that copies weights, four that multiply.

Work is a table: for each phase of a layer and each program a row of words (`words`), the same for all layers. A phase
begins when all programs have ended the one before (a counter in memory), its weights are on their way before that.

In the table's loops no bound is carried from step to step: Triton 3.6 loses such a value. Bounds are loaded in each step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

WORDS = gl.constexpr(24)  # of a table's row
HEAD = gl.constexpr(128)  # size of a head, which is the width of a tile
WARPS = gl.constexpr(4)
NORM = gl.constexpr(1)  # flags: the input is normed, gated, put together from parts of attention
GATE = gl.constexpr(2)
PARTS = gl.constexpr(4)
LOW = gl.constexpr(-1e30)

# Inputs lie in shared memory as the instruction takes them, 32 columns after another: of its columns
# 16 i + 8 h + 2 t + b thread t has those of 8 t + 4 i + 2 h + b, 16 bytes in a row.
PLACES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [4], [32], [64]], [[8], [16], [0], [0], [0]], [[0], [0]], [], [128]
    )
)


@gluon.jit
def seen(counter):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def clock():
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(counter, target, state, code):
    """Until `target` programs have arrived. After state[0] looks: writes the code and lets nobody wait any more."""
    patience = gl.load(state, volatile=True)
    tries = 0
    v = seen(counter)
    while (v - target < 0) & (tries < patience):
        v = seen(counter)
        tries += 1
    if v - target < 0:
        gl.store(state, 0)
        if gl.load(state + 1 + gl.program_id(0), volatile=True) == 0:
            gl.store(state + 1 + gl.program_id(0), code)


@gluon.jit
def ask(keys, values, start, most):
    """Keys and values from row `start` on, 64 of them but none behind row `most`, on their way to the L2."""
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = gl.minimum(start + i // 2, most).to(gl.int64) * 128 + i % 2 * 64
    for p in gl.static_range(2):
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(values if p else keys) + at], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def operand(x, slot, ZERO, RHS: gl.constexpr):
    """[128, 8]: the inputs of a tile, the same in all columns."""
    v = gl.permute(gl.reshape(x.index(slot).load(PLACES), [4, 4, 2, 2, 2]), (0, 2, 3, 1, 4))
    v = gl.convert_layout(gl.reshape(v, [128]), gl.SliceLayout(1, RHS), assert_trivial=True)
    b, _ = gl.broadcast(gl.expand_dims(v, 1), ZERO)
    return b


@gluon.jit
def place(a):
    """[16, 128] in the order of `PLACES`."""
    return gl.reshape(gl.permute(gl.reshape(a, [16, 4, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5)), [16, 128])


@gluon.jit
def stage(high, low, act, gains, gain, xo, xu, kc, nK, K, nx, flags, SPLIT: gl.constexpr):
    """Inputs of nx chunks of 128 columns from chunk kc on, which begins again behind chunk nK, in two half-precision parts."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    for i0 in range(0, nx, 16):
        k = kc + i0 + row
        k = gl.where(k >= nK, k - nK, k)
        at = gl.expand_dims(k, 1) * 128 + c
        inside = gl.expand_dims(i0 + row < nx, 1) & (at < K)
        if flags & PARTS:
            head = gl.where(i0 + row < nx, k, 0) * SPLIT
            most = gl.full([16], LOW, gl.float32, gl.SliceLayout(1, L))
            for s in gl.static_range(SPLIT):
                most = gl.maximum(most, gl.load(act + xu + (head + s) * 2, cache_modifier=".cg"))
            sums = gl.zeros([16], gl.float32, gl.SliceLayout(1, L))
            a = gl.zeros([16, 128], gl.float32, L)
            for s in gl.static_range(SPLIT):
                m = gl.exp2(gl.load(act + xu + (head + s) * 2, cache_modifier=".cg") - most)
                sums += m * gl.load(act + xu + (head + s) * 2 + 1, cache_modifier=".cg")
                part = gl.load(act + xo + gl.expand_dims(head + s, 1) * 128 + c, mask=inside, other=0.0, cache_modifier=".cg")
                a += gl.expand_dims(m, 1) * part
            a = a / gl.expand_dims(sums, 1)
        else:
            a = gl.load(act + xo + at, mask=inside, other=0.0, cache_modifier=".cg")
            if flags & NORM:
                a *= gl.load(gains + gain + at, mask=inside, other=0.0)
            if flags & GATE:
                u = gl.load(act + xu + at, mask=inside, other=0.0, cache_modifier=".cg")
                a = a / (1 + gl.exp(-a)) * u
        h = a.to(gl.bfloat16)
        high.index(i0 // 16).store(place(h))
        low.index(i0 // 16).store(place((a - h.to(gl.float32)).to(gl.bfloat16)))


@gluon.jit
def attend(act, keys, values, rope, layer, pos, context, xo, yo, mo, head, split, heads, kv_heads, scale,
           SPLIT: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """A part of a head's attention: sums that are not divided yet, their largest exponent and the sum of weights."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    d = gl.arange(0, 128, gl.SliceLayout(0, L))
    row = gl.arange(0, BK, gl.SliceLayout(1, L))
    group = heads // kv_heads
    kv = head // group
    per = (pos + SPLIT) // SPLIT
    first = split * per
    end = gl.minimum(first + per, pos)
    base = (layer * kv_heads + kv) * context
    cos = gl.load(rope + pos * 128 + (d & 63))
    sin = gl.load(rope + pos * 128 + 64 + (d & 63))
    sin = gl.where(d < 64, -sin, sin)
    q = gl.load(act + xo + head * 128 + d, cache_modifier=".cg")
    q2 = gl.load(act + xo + head * 128 + (d ^ 64), cache_modifier=".cg")
    k0 = gl.load(act + xo + (heads + kv) * 128 + d, cache_modifier=".cg")
    k2 = gl.load(act + xo + (heads + kv) * 128 + (d ^ 64), cache_modifier=".cg")
    v0 = gl.load(act + xo + (heads + kv_heads + kv) * 128 + d, cache_modifier=".cg").to(gl.bfloat16)
    q = (q * cos + q2 * sin) * scale
    k0 = (k0 * cos + k2 * sin).to(gl.bfloat16)
    most = gl.full([BK], LOW, gl.float32, gl.SliceLayout(1, L))
    total = gl.zeros([BK], gl.float32, gl.SliceLayout(1, L))
    acc = gl.zeros([BK, 128], gl.float32, L)
    for b in range(first, end, BK):
        at = (base + b).to(gl.int64) * 128 + (gl.expand_dims(row, 1) * 128 + gl.expand_dims(d, 0))
        inside = gl.expand_dims(b + row < end, 1) & (gl.expand_dims(d, 0) < 128)
        k = gl.load(keys + at, mask=inside, other=0.0)
        v = gl.load(values + at, mask=inside, other=0.0)
        s = gl.where(b + row < end, gl.sum(k.to(gl.float32) * gl.expand_dims(q, 0), 1), LOW)
        m = gl.maximum(most, s)
        old = gl.exp2(most - m)
        p = gl.where(b + row < end, gl.exp2(s - m), 0.0)
        total = total * old + p
        acc = acc * gl.expand_dims(old, 1) + gl.expand_dims(p, 1) * v.to(gl.float32)
        most = m
    own = (pos >= first) & (pos < first + per)
    s = gl.where(own, gl.sum(q * k0.to(gl.float32), 0), LOW)
    m = gl.maximum(gl.max(most, 0), s)
    w = gl.exp2(most - m)
    p = gl.where(own, gl.exp2(s - m), 0.0)
    y = gl.sum(acc * gl.expand_dims(w, 1), 0) + p * v0.to(gl.float32)
    part = head * SPLIT + split
    gl.store(act + yo + part * 128 + d, y)
    gl.store(act + mo + part * 2, m)
    gl.store(act + mo + part * 2 + 1, gl.sum(total * w, 0) + p)
    if own:
        if head % group == 0:
            new = (base + pos).to(gl.int64) * 128
            gl.store(keys + new + d, k0)
            gl.store(values + new + d, v0)


@gluon.jit
def consume(ring, full, empty, begun, high, low, table, act, gains, keys, values, rope, position, counter, state, marks, clocks,
            first, last, phases, programs, context, heads, kv_heads, scale, eps,
            NS: gl.constexpr, HIDDEN: gl.constexpr, WIDE: gl.constexpr, SPLIT: gl.constexpr, BK: gl.constexpr, BOTH: gl.constexpr,
            MARK: gl.constexpr, CLOCK: gl.constexpr):  # fmt: skip
    pid = gl.program_id(0)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RHS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L1: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    LN: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    zero = gl.zeros([128, 8], gl.bfloat16, RHS)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    share = gl.arange(0, 256, L1)
    wide = gl.arange(0, WIDE, LN)
    by_row = high._reinterpret(gl.bfloat16, [high.shape[0] * 16, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    by_row_low = low._reinterpret(gl.bfloat16, [high.shape[0] * 16, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s = 0
    parity = 0
    for it in range(first, last):
        layer = it // phases
        d = table + ((it - layer * phases) * programs + pid) * WORDS
        n = gl.load(d)
        kc = gl.load(d + 1)
        nK = gl.load(d + 2)
        K = gl.load(d + 3) * 16
        xo = gl.load(d + 4) * 16
        xu = gl.load(d + 5) * 16
        yo = gl.load(d + 6)
        row = gl.load(d + 7)
        R = gl.load(d + 8)
        zo = gl.load(d + 9)
        zn = gl.load(d + 10)
        flags = gl.load(d + 11)
        gain = (layer * 2 + gl.load(d + 12)) * HIDDEN
        head = gl.load(d + 13)
        split = gl.load(d + 14)
        pos = gl.load(position)
        if head >= 0:
            cache = (layer * kv_heads + head // (heads // kv_heads)) * context
            ask(keys, values, cache + split * ((pos + SPLIT) // SPLIT), cache + pos)
        if MARK:
            gl.store(marks + pid * 4, it * 8 + 1)
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4, clock())
        wait_for(counter, (it - first) * programs, state, it + 1)
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 1, clock())
        if MARK:
            gl.store(marks + pid * 4, it * 8 + 2)
        factor = 1.0
        if head >= 0:
            attend(act, keys, values, rope, layer, pos, context, xo, yo, xu, head, split, heads, kv_heads, scale, SPLIT, BK)
        nx = gl.minimum(n, nK)
        h = gl.load(act + xo + wide, mask=(wide < HIDDEN) & ((flags & NORM) != 0), other=0.0, cache_modifier=".cg")
        stage(high, low, act, gains, gain, xo, xu, kc, nK, K, nx, flags, SPLIT)
        if flags & NORM:  # a product is linear
            factor = gl.rsqrt(gl.sum(h * h, 0) / HIDDEN + eps)
        begun.store(gl.full([1], it, gl.int32, L1))
        thread_barrier()
        # results of the next phase are sums; the last that read them ended long ago
        gl.store(act + zo + share, gl.zeros([256], gl.float32, L1), mask=share < zn)
        if MARK:
            gl.store(marks + pid * 4, it * 8 + 3)
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 2, clock())
        a = gl.zeros([64, 8], gl.float32, MMA)
        b = gl.zeros([64, 8], gl.float32, MMA)
        slot = 0
        for j in range(n):
            mbarrier.wait(full.index(s), parity)
            w = ring.index(s).load(LHS)
            a = mma_v2(w, operand(by_row, slot, zero, RHS), a)
            if BOTH:
                b = mma_v2(w, operand(by_row_low, slot, zero, RHS), b)
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
                y = gl.sum(a + b, 1) * (0.125 * factor)
                gl.atomic_add(act + yo + row + rows, y, mask=row + rows < R, sem="relaxed", scope="gpu")
                a = gl.zeros([64, 8], gl.float32, MMA)
                b = gl.zeros([64, 8], gl.float32, MMA)
                kc = 0
                row += 64
        if CLOCK:
            gl.store(clocks + (it * programs + pid) * 4 + 3, clock())
        thread_barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        if MARK:
            gl.store(marks + pid * 4, it * 8 + 4)
    # the last to leave sets the counters back
    if gl.atomic_add(counter + 32, 1, sem="acq_rel", scope="gpu") == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 32, 0)
    if MARK:
        gl.store(marks + pid * 4, last * 8 + 5)


@gluon.jit
def produce(ring, full, empty, begun, w0, w1, w2, w3, table, marks, first, last, phases, programs, before, after,
            NS: gl.constexpr, MARK: gl.constexpr):  # fmt: skip
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
        layer = it // phases
        d = table + ((it - layer * phases) * programs + pid) * WORDS
        n = gl.load(d)
        k = gl.load(d + 1)
        nK = gl.load(d + 2)
        which = gl.load(d + 15)
        r = gl.load(d + 16) + layer * gl.load(d + 17)
        c0 = gl.load(d + 18)
        dr = gl.load(d + 19)  # rows from tile to tile, and to the next row of tiles
        rr = gl.load(d + 20)
        dc = gl.load(d + 21)
        for j in range(n):
            if MARK:
                gl.store(marks + pid * 4 + 1, it * 4096 + j)
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
            c = c0 + k * dc
            mbarrier.expect(full.index(s), 16384)
            if which < 2:
                if which == 0:
                    tma.async_copy_global_to_shared(w0, [r, c], full.index(s), ring.index(s))
                else:
                    tma.async_copy_global_to_shared(w1, [r, c], full.index(s), ring.index(s))
            else:
                if which == 2:
                    tma.async_copy_global_to_shared(w2, [r, c], full.index(s), ring.index(s))
                else:
                    tma.async_copy_global_to_shared(w3, [r, c], full.index(s), ring.index(s))
            g += 1
            s += 1
            if s == NS:
                s = 0
                parity = parity ^ 1
            r += dr
            k += 1
            if k == nK:
                k = 0
                r += rr


@gluon.jit(do_not_specialize=["first", "last", "phases", "programs", "context", "heads", "kv_heads", "before", "after"])
def token_kernel(w0, w1, w2, w3, table, act, gains, keys, values, rope, position, counter, state, marks, clocks,
                 first, last, phases, programs, context, heads, kv_heads, before, after, scale, eps,
                 NS: gl.constexpr, NX: gl.constexpr, HIDDEN: gl.constexpr, WIDE: gl.constexpr, SPLIT: gl.constexpr, BK: gl.constexpr,
                 BOTH: gl.constexpr, MARK: gl.constexpr, CLOCK: gl.constexpr):  # fmt: skip
    """Phases `first` to `last` (counted through all layers) of a token.

    NS: tiles in the ring. NX: sixteens of chunks of inputs that a program has in a phase at most. counter: [64], zeros.
    state: [1 + programs], how often to look at the counter, then codes of errors. BOTH: inputs in two parts, else one."""
    ring = gl.allocate_shared_memory(gl.bfloat16, [NS, 64, 128], w0.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    high = gl.allocate_shared_memory(gl.bfloat16, [NX, 16, 128], plain)
    low = gl.allocate_shared_memory(gl.bfloat16, [NX, 16, 128], plain)
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
            (consume, (ring, full, empty, begun, high, low, table, act, gains, keys, values, rope, position, counter, state, marks, clocks,
                       first, last, phases, programs, context, heads, kv_heads, scale, eps, NS, HIDDEN, WIDE, SPLIT, BK, BOTH, MARK, CLOCK)),
            (produce, (ring, full, empty, begun, w0, w1, w2, w3, table, marks, first, last, phases, programs, before, after, NS, MARK)),
        ],
        [1],
        [24],
    )  # fmt: skip
