"""All layers of one token in one kernel: a program a multiprocessor, one warp that copies weights, eight
that multiply.

Work is a table: for each step and each program a row of words (`tables.py`). A step begins when all
programs have ended the one before (a counter in memory); its weights are on their way before that.
Results are sums of integers of 2^-32, so that they do not depend on who comes first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from blr.kernels.decode.token.heads import attend
from blr.kernels.decode.token.inputs import AT_ONCE, NORM, TIMES, WIDENED, operand, stage
from blr.kernels.decode.token.ring import RING, ROWS, next_slot, produce
from blr.kernels.decode.token.shims import seen_as, thread_barrier
from blr.kernels.decode.token.sums import arrive, number, row_of, to_sums, wait_for


@gluon.jit
def multiply(pipe, by_row, at, words, nx, factor, sums, state):
    """The tiles of a step. at: slot and parity of the ring; returns the next ones."""
    ring, full, empty, _ = pipe
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LHS: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RHS: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    zero = gl.zeros([128, 2, 4], ring.dtype, WIDENED)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    n, kc, nK, row, R = words[0], words[1], words[2], words[7], words[8]
    s, parity = at
    a = gl.zeros([ROWS, 8], gl.float32, MMA)
    slot = 0
    for j in range(n):
        mbarrier.wait(full.index(s), parity)
        a = mma_v2(ring.index(s).load(LHS), operand(by_row, slot, zero, RHS), a)
        mbarrier.arrive(empty.index(s), count=1)
        s, parity = next_slot(s, parity)
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
def begin(x, sums, words, counter, state, programs, T: gl.constexpr):
    """Put this program's part of the residual stream into sums, and zeros where the first step adds."""
    share, mine, inside = share_of(programs, T)
    to_sums(sums, mine, gl.load(x + mine, mask=inside, other=0.0), inside, state, False)
    nothing(sums, words, share)
    arrive(counter)


@gluon.jit
def share_of(programs, T: gl.constexpr):
    """Up to 256 numbers: from 0 on, of the residual stream for this program, and whether they are."""
    share = gl.arange(0, 256, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    per = (T.HIDDEN + programs - 1) // programs
    mine = gl.program_id(0) * per + share
    return share, mine, (share < per) & (mine < T.HIDDEN)


@gluon.jit
def nothing(sums, words, share):
    """Set this program's part of the next step's results to zero."""
    gl.store(sums + words[9] + share, (share * 0).to(gl.int64), mask=share < words[10])


@gluon.jit
def factor_of(h, normed, eps, T: gl.constexpr):
    factor = 1.0
    if normed:
        factor = gl.rsqrt(gl.sum(h * h, 0) / T.HIDDEN + eps)
    return factor


@gluon.jit
def prepare(inputs, memory, words, nx, eps, T: gl.constexpr):
    """Make the inputs of a step; returns what its results are to be multiplied by."""
    sums, _, _ = memory
    WIDE: gl.constexpr = T.WIDE
    wide = gl.arange(0, WIDE, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
    normed = (words[11] & NORM) != 0
    h = number(sums + wide, (wide < T.HIDDEN) & normed)
    EARLY: gl.constexpr = inputs.dtype == gl.float16  # what is not normed may be beyond its range
    before = factor_of(h, normed & EARLY, eps, T)
    stage(inputs, memory, words, nx, before, T)
    return factor_of(h, normed & (not EARLY), eps, T)  # a product is linear


@gluon.jit
def consume(pipe, inputs, table, x, memory, attention, shared, eps, T: gl.constexpr):
    """The warps that multiply."""
    sums, parts, _ = memory
    counter, state, steps, programs = shared
    by_row = seen_as(inputs, [TIMES * AT_ONCE, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share, _, _ = share_of(programs, T)
    begin(x, sums, row_of(table, -1, programs), counter, state, programs, T)
    words = row_of(table, 0, programs)
    at = (0, 0)
    for it in range(steps):
        ahead = row_of(table, gl.minimum(it + 1, steps - 1), programs)
        wait = (counter, (it + 1) * programs, state, it)
        if words[13] >= 0:
            attend(sums, parts, attention, words, wait, T)
        else:
            wait_for(wait)
        nx = gl.minimum(words[0], words[2])
        factor = prepare(inputs, memory, words, nx, eps, T)
        pipe[3].store(gl.full([1], it, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
        thread_barrier()
        nothing(sums, words, share)  # the last that read them ended long ago
        at = multiply(pipe, by_row, at, words, nx, factor, sums, state)
        arrive(counter)
        words = ahead
    wait_for((counter, (steps + 1) * programs, state, steps))
    end(x, sums, counter, state, programs, T)


@gluon.jit
def end(x, sums, counter, state, programs, T: gl.constexpr):
    """Put this program's part of the residual stream back, NaN if anything was lost. The last to leave
    sets the counters back."""
    _, mine, inside = share_of(programs, T)
    h = number(sums + mine, inside)
    lost = gl.load(state + 1, volatile=True) + gl.load(state + 2 + gl.program_id(0), volatile=True)
    gl.store(x + mine, gl.where(lost == 0, h, float("nan")), mask=inside)
    thread_barrier()
    if gl.atomic_add(counter + 32, 1, sem="acq_rel", scope="gpu") == programs - 1:
        gl.store(counter, 0)
        gl.store(counter + 32, 0)
        gl.store(state + 1, 0)


@gluon.jit
def make_pipe(w):
    """The ring of tiles, barriers of its full and empty slots, and the step that has begun here."""
    ring = gl.allocate_shared_memory(w.dtype, [RING, ROWS, 128], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begun.store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return ring, full, empty, begun


@gluon.jit(do_not_specialize=["steps", "programs", "context", "stride", "heads", "kv_heads"])
def token_kernel(w0, w1, w2, w3, w4, w5, table, x, sums, parts, gains, bias, head_gains, keys, values,
                 cos, sin, position, starts, counter, state, steps, programs, context, stride, heads,
                 kv_heads, scale, eps, head_eps, T: gl.constexpr):  # fmt: skip
    """All steps of a token. x: [hidden] in float32, in and out.

    counter: [64], zeros. state: [2 + programs]: how often to look at the counter, whether a number was
    not finite or too large, steps before which programs waited in vain. stride: of layers in keys and
    values, in units of 128. T: `launch.Shape`."""
    pipe = make_pipe(w0)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    inputs = gl.allocate_shared_memory(w0.dtype, [TIMES, AT_ONCE, 256], plain)
    pos, start = gl.load(position).to(gl.int32), gl.load(starts).to(gl.int32)
    memory = (sums, parts, gains)
    attention = (bias, head_gains, keys, values, cos, sin, pos, start, context, stride, heads, kv_heads,
                 scale, head_eps)  # fmt: skip
    shared = (counter, state, steps, programs)
    gl.warp_specialize(
        [
            (consume, (pipe, inputs, table, x, memory, attention, shared, eps, T)),
            (produce, (pipe, (w0, w1, w2, w3, w4, w5), table, steps, programs)),
        ],
        [1],
        [24],
    )
