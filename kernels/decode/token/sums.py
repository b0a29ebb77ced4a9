"""Words, sums and waiting, of which all programs of the kernel have the same."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blr.kernels.decode.token.shims import thread_barrier

WORDS = gl.constexpr(20)  # of a table's row
ONE = gl.constexpr(4294967296.0)  # as a sum
LARGEST = gl.constexpr(67108864.0)  # of a sum


@gluon.jit
def row_of(table, step, programs):
    """The words of this program in a step; before the first step, -1."""
    d = table + ((step + 1) * programs + gl.program_id(0)) * WORDS
    return (gl.load(d), gl.load(d + 1), gl.load(d + 2), gl.load(d + 3), gl.load(d + 4), gl.load(d + 5),
            gl.load(d + 6), gl.load(d + 7), gl.load(d + 8), gl.load(d + 9), gl.load(d + 10),
            gl.load(d + 11), gl.load(d + 12), gl.load(d + 13), gl.load(d + 14), gl.load(d + 15),
            )  # fmt: skip


@gluon.jit
def number(pointer, mask=None):
    """Sums in float32."""
    if mask is None:
        v = gl.load(pointer, cache_modifier=".cg")
    else:
        v = gl.load(pointer, mask=mask, other=0, cache_modifier=".cg")
    return v.to(gl.float32) * (1 / ONE)


@gluon.jit
def to_sums(sums, at, y, mask, state, ADD: gl.constexpr):
    """Put numbers into sums, or add them. What is not finite, or too large, is told in the state."""
    bad = ((y > -LARGEST) & (y < LARGEST)) == 0
    gl.store(state + 1 + at * 0, 1, mask=mask & bad)
    y = gl.where(bad, 0.0, y * ONE).to(gl.int64)
    if ADD:
        gl.atomic_add(sums + at, y, mask=mask, sem="relaxed", scope="gpu")
    else:
        gl.store(sums + at, y, mask=mask)


@gluon.jit
def arrive(counter):
    """Tell that this program has ended a step."""
    thread_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


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
