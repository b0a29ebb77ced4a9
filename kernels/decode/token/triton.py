"""All layers of one token in one kernel: a program a multiprocessor, one warp that copies weights, eight
that multiply.

Work is a table: for each step and each program a row of words (`tables.py`). A step begins when all
programs have ended the one before (a counter in memory); its weights are on their way before that.
Results are sums of integers of 2^-32, so that they do not depend on who comes first.

Triton 3.6 loses a value that a loop carries and that only bounds an inner loop: the copying warp loads
its words anew.
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
CYCLES = gl.constexpr("mov.u32 $0, %clock;")
ONE = gl.constexpr(4294967296.0)
LARGEST = gl.constexpr(67108864.0)  # of a sum

# Inputs lie in shared memory as the instruction takes them, 32 columns after another: its columns 16 i +
# 8 h + 2 t + b are those of thread t, at 8 t + 4 i + 2 h + b, 16 bytes in a row; low parts behind 128.
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
    return gl.inline_asm_elementwise(CYCLES, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for(wait):
    """wait: (counter, how many programs must have arrived, state, step). One thread looks; after 1024 ·
    state[0] times it gives up, for all that follow too, and leaves the step's number and one."""
    counter, target, state, step = wait
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
    return gl.reshape(
        gl.permute(gl.reshape(a, [a.shape[0], 4, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5)), a.shape
    )


@gluon.jit
def joined(parts, xo, xu, column, inside, T: gl.constexpr):
    """[rows, 128]: results of attention, put together from those of SPLIT programs a head. parts: sums
    from xo on, largest exponents and sums of weights from xu on."""
    head = column // T.D * T.SPLIT
    at = parts + xo + head * T.D + column % T.D
    most = gl.load(parts + xu + head * 2, cache_modifier=".cg")
    total = gl.load(parts + xu + head * 2 + 1, cache_modifier=".cg")
    a = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    SPLIT: gl.constexpr = T.SPLIT
    for s in gl.static_range(1, SPLIT):
        m = gl.load(parts + xu + (head + s) * 2, cache_modifier=".cg")
        weights = gl.load(parts + xu + (head + s) * 2 + 1, cache_modifier=".cg")
        part = gl.load(at + s * T.D, mask=inside, other=0.0, cache_modifier=".cg")
        both = gl.maximum(most, m)
        old = gl.exp2(most - both)
        new = gl.exp2(m - both)
        total = total * old + weights * new
        a = a * old + part * new
        most = both
    return a / total


@gluon.jit
def stage(inputs, memory, words, nx, T: gl.constexpr):
    """Inputs of nx chunks of 128 columns, in two half-precision parts, from the words' chunk on; behind
    the last comes the first. The last ends with the row: what others have of it is zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    sums, parts, gains = memory
    kc, nK, K, flags = words[1], words[2], words[3] * 8, words[11]
    xo, xu = words[4] * 16, words[5] * 16
    NR: gl.constexpr = T.NR
    row = gl.arange(0, NR, gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    for i in range(0, nx, T.NR):
        k = kc + i + row
        k = gl.expand_dims(gl.where(k >= nK, k - nK, k), 1)
        at = gl.minimum(k * 128, K - 128) + c
        inside = gl.expand_dims(i + row < nx, 1) & (at >= k * 128)
        if flags & PARTS:
            a = joined(parts, xo, xu, at, inside, T)
        else:
            a = number(sums + xo + at, inside)
            if flags & NORM:
                a *= gl.load(gains + words[12] * T.HIDDEN + at, mask=inside, other=0.0)
            if flags & GATE:
                a = a / (1 + gl.exp(-a)) * number(sums + xu + at, inside)
        h = a.to(inputs.dtype)
        inputs.index(i // T.NR).slice(0, 128, dim=1).store(place(h))
        low = (a - h.to(gl.float32)).to(inputs.dtype)
        inputs.index(i // T.NR).slice(128, 128, dim=1).store(place(low))


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
def attend(sums, parts, attention, words, wait, T: gl.constexpr):
    """A part of a head's attention: sums that are not divided yet, their largest exponent and the sum of
    weights. Keys and values of earlier tokens are on their way before the wait."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // T.D, T.D // 8], [WARPS, 1], [1, 0])
    D: gl.constexpr = T.D
    BK: gl.constexpr = T.BK
    bias, gain, keys, values, cos, sin, pos, start, context, stride, heads, kv_heads, scale, eps = (
        attention
    )
    window, head, split, layer = words[12], words[13], words[14], words[15]
    d = gl.arange(0, D, gl.SliceLayout(0, L))
    row = gl.arange(0, BK, gl.SliceLayout(1, L))
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
    source = sums + words[4] * 16
    bias += layer * (heads + 2 * kv_heads) * D
    gain += layer * 2 * D
    q = turned(source + head * D, bias + head * D, gain, d, c, s, eps, T) * scale
    own = (heads + kv) * D
    new_k = turned(source + own, bias + own, gain + D, d, c, s, eps, T).to(k.dtype)
    own += kv_heads * D
    new_v = number(source + own + d)
    if T.BIAS:
        new_v += gl.load(bias + own + d)
    new_v = new_v.to(k.dtype)
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
    mine = (pos >= first) & (pos < first + per)
    score = gl.where(mine, gl.sum(q * new_k.to(gl.float32), 0), LOW)
    m = gl.maximum(gl.max(most, 0), score)
    w = gl.exp2(most - m)
    p = gl.where(mine, gl.exp2(score - m), 0.0)
    y = gl.sum(acc * gl.expand_dims(w, 1), 0) + p * new_v.to(gl.float32)
    part = head * T.SPLIT + split
    gl.store(parts + words[6] + part * D + d, y)
    exponents = parts + words[5] * 16 + part * 2
    gl.store(exponents, m)
    gl.store(exponents + 1, gl.sum(total * w, 0) + p)
    if mine & (head % group == 0):
        gl.store(keys + base + pos * D + d, new_k)
        gl.store(values + base + pos * D + d, new_v)


@gluon.jit
def row_of(table, step, programs):
    """The words of this program in a step; before the first step, -1."""
    d = table + ((step + 1) * programs + gl.program_id(0)) * WORDS
    return (gl.load(d), gl.load(d + 1), gl.load(d + 2), gl.load(d + 3), gl.load(d + 4), gl.load(d + 5),
            gl.load(d + 6), gl.load(d + 7), gl.load(d + 8), gl.load(d + 9), gl.load(d + 10),
            gl.load(d + 11), gl.load(d + 12), gl.load(d + 13), gl.load(d + 14), gl.load(d + 15),
            )  # fmt: skip


@gluon.jit
def to_sums(sums, at, y, mask, state, ADD: gl.constexpr):
    """Put numbers into sums, or add them. What is not finite, or too large, is told in the state."""
    if sums.dtype.element_ty == gl.int64:
        bad = ((y > -LARGEST) & (y < LARGEST)) == 0
        gl.store(state + 1 + at * 0, 1, mask=mask & bad)
        y = gl.where(bad, 0.0, y * ONE).to(gl.int64)
    if ADD:
        gl.atomic_add(sums + at, y, mask=mask, sem="relaxed", scope="gpu")
    else:
        gl.store(sums + at, y, mask=mask)


@gluon.jit
def next_slot(s, parity, NS: gl.constexpr):
    s += 1
    if s == NS:
        s = 0
        parity = parity ^ 1
    return s, parity


@gluon.jit
def multiply(pipe, by_row, at, words, nx, factor, sums, state, T: gl.constexpr):
    """The tiles of a step. at: slot and parity of the ring; returns the next ones."""
    ring, full, empty, _ = pipe
    HALF: gl.constexpr = ring.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RHS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    zero = gl.zeros([128, 2, 4], HALF, WIDENED)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    n, kc, nK, row, R = words[0], words[1], words[2], words[7], words[8]
    s, parity = at
    a = gl.zeros([ROWS, 8], gl.float32, MMA)
    slot = 0
    for j in range(n):
        mbarrier.wait(full.index(s), parity)
        a = mma_v2(ring.index(s).load(LHS), operand(by_row, slot, zero, RHS), a)
        mbarrier.arrive(empty.index(s), count=1)
        s, parity = next_slot(s, parity, T.NS)
        slot += 1
        if slot == nx:
            slot = 0
        kc += 1
        if (kc == nK) | (j == n - 1):
            to = gl.minimum(row, R - ROWS) + rows
            y = gl.sum(a, 1) * (0.25 * factor)
            to_sums(sums, words[6] + to, y, to >= row, state, True)
            a = gl.zeros([ROWS, 8], gl.float32, MMA)
            kc = 0
            row += ROWS
    return s, parity


@gluon.jit
def consume(
    pipe, inputs, table, x, memory, attention, counter, state, clocks, span, eps, T: gl.constexpr
):
    """The warps that multiply: all steps from span[0] to span[1], of span[2], by span[3] programs."""
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LN: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    first, last, steps, programs = span
    sums, parts, _ = memory
    pid = gl.program_id(0)
    share = gl.arange(0, 256, L1)
    WIDE: gl.constexpr = T.WIDE
    wide = gl.arange(0, WIDE, LN)
    nothing = gl.zeros([256], sums.dtype.element_ty, L1)
    by_row = seen_as(inputs, [inputs.shape[0] * T.NR, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    per = (T.HIDDEN + programs - 1) // programs
    mine = pid * per + share
    h_mask = (share < per) & (mine < T.HIDDEN)
    arrived = 0
    if first == 0:  # the residual stream, and what the first step adds to
        words = row_of(table, -1, programs)
        to_sums(sums, mine, gl.load(x + mine, mask=h_mask, other=0.0), h_mask, state, False)
        gl.store(sums + words[9] + share, nothing, mask=share < words[10])
        thread_barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        arrived = programs
    words = row_of(table, first, programs)
    at = (0, 0)
    for it in range(first, last):
        ahead = row_of(table, gl.minimum(it + 1, steps - 1), programs)
        stamps = clocks + (it * programs + pid) * 4
        flags = words[11]
        if T.CLOCK:
            gl.store(stamps, clock())
        wait = (counter, arrived, state, it)
        if words[13] >= 0:
            attend(sums, parts, attention, words, wait, T)
        else:
            wait_for(wait)
        if T.CLOCK:
            gl.store(stamps + 1, clock())
        factor = 1.0
        nx = gl.minimum(words[0], words[2])
        h = number(sums + wide, (wide < T.HIDDEN) & ((flags & NORM) != 0))
        stage(inputs, memory, words, nx, T)
        if flags & NORM:  # a product is linear
            factor = gl.rsqrt(gl.sum(h * h, 0) / T.HIDDEN + eps)
        pipe[3].store(gl.full([1], it, gl.int32, L1))
        thread_barrier()
        # results of the next step are sums; the last that read them ended long ago
        gl.store(sums + words[9] + share, nothing, mask=share < words[10])
        if T.CLOCK:
            gl.store(stamps + 2, clock())
        at = multiply(pipe, by_row, at, words, nx, factor, sums, state, T)
        if T.CLOCK:
            gl.store(stamps + 3, clock())
        thread_barrier()
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        arrived += programs
        words = ahead
    if last == steps:
        wait_for((counter, arrived, state, last))
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
def copy(weights, which, r, c, bar, slot):
    """One tile on its way from the tensor `which` of six."""
    if which < 2:
        if which == 0:
            copy_tile(weights[0], [r, c], bar, slot)
        else:
            copy_tile(weights[1], [r, c], bar, slot)
    elif which < 4:
        if which == 2:
            copy_tile(weights[2], [r, c], bar, slot)
        else:
            copy_tile(weights[3], [r, c], bar, slot)
    else:
        if which == 4:
            copy_tile(weights[4], [r, c], bar, slot)
        else:
            copy_tile(weights[5], [r, c], bar, slot)


@gluon.jit
def produce(pipe, weights, table, span, before, after, T: gl.constexpr):
    """The warp that copies tiles; under way are at most `before` while their step has not begun here,
    `after` then."""
    ring, full, empty, begun = pipe
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first, last, _, programs = span
    s, parity = 0, 1
    s2, parity2 = 0, 0
    s4, parity4 = 0, 0
    g = 0
    for it in range(first, last):
        d = table + ((it + 1) * programs + gl.program_id(0)) * WORDS
        n = gl.load(d)
        k = gl.load(d + 1)
        nK = gl.load(d + 2)
        K = gl.load(d + 3) * 8
        row = gl.load(d + 7)
        R = gl.load(d + 8)
        which = gl.load(d + 16)
        r0 = gl.load(d + 17)
        c0 = gl.load(d + 18)
        for _j in range(n):
            mbarrier.wait(empty.index(s), parity)
            if g >= after:
                mbarrier.wait(full.index(s4), parity4)
                s4, parity4 = next_slot(s4, parity4, T.NS)
            if g >= before:
                if gl.max(begun.load(L1), 0) < it:
                    mbarrier.wait(full.index(s2), parity2)
                s2, parity2 = next_slot(s2, parity2, T.NS)
            mbarrier.expect(full.index(s), ROWS * 256)
            # tiles end with their matrix
            r, c = r0 + gl.minimum(row, R - ROWS), c0 + gl.minimum(k * 128, K - 128)
            copy(weights, which, r, c, full.index(s), ring.index(s))
            g += 1
            s, parity = next_slot(s, parity, T.NS)
            k += 1
            if k == nK:
                k = 0
                row += ROWS


@gluon.jit(do_not_specialize=["first", "last", "steps", "programs", "context", "stride", "heads",
                              "kv_heads", "before", "after"])  # fmt: skip
def token_kernel(w0, w1, w2, w3, w4, w5, table, x, sums, parts, gains, bias, head_gains, keys, values,
                 cos, sin, position, starts, counter, state, clocks, first, last, steps, programs,
                 context, stride, heads, kv_heads, before, after, scale, eps, head_eps,
                 T: gl.constexpr):  # fmt: skip
    """Steps `first` to `last` of a token. x: [hidden] in float32, in and out.

    counter: [64], zeros. state: [2 + programs]: how often to look at the counter, whether a number was
    not finite or too large, steps before which programs waited in vain. stride: of layers in keys and
    values, in units of 128. T: `launch.Shape`."""
    HALF: gl.constexpr = keys.dtype.element_ty
    NS: gl.constexpr = T.NS
    ring = gl.allocate_shared_memory(HALF, [NS, ROWS, 128], w0.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NX: gl.constexpr = T.NX
    NR: gl.constexpr = T.NR
    inputs = gl.allocate_shared_memory(HALF, [NX, NR, 256], plain)
    full = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begun.store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    for i in gl.static_range(NS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    pos, start = gl.load(position).to(gl.int32), gl.load(starts).to(gl.int32)
    pipe = (ring, full, empty, begun)
    memory = (sums, parts, gains)
    attention = (bias, head_gains, keys, values, cos, sin, pos, start, context, stride, heads, kv_heads,
                 scale, head_eps)  # fmt: skip
    span = (first, last, steps, programs)
    gl.warp_specialize(
        [
            (consume, (pipe, inputs, table, x, memory, attention, counter, state, clocks, span, eps, T)),
            (produce, (pipe, (w0, w1, w2, w3, w4, w5), table, span, before, after, T)),
        ],
        [1],
        [24],
    )
