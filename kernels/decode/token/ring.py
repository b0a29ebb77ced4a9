"""The warp that copies tiles of weights into a ring in shared memory.

Triton 3.6 loses a value that a loop carries and that only bounds an inner loop: the warp loads its words
anew.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from blr.kernels.decode.token.shims import copy_tile
from blr.kernels.decode.token.sums import WORDS

RING = gl.constexpr(6)  # tiles
ROWS = gl.constexpr(128)  # of a tile, and its columns


@gluon.jit
def next_slot(s, parity):
    s += 1
    if s == RING:
        s = 0
        parity = parity ^ 1
    return s, parity


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
def produce(pipe, weights, table, steps, programs):
    """All tiles of a program. One is under way while its step has not begun here, two then."""
    ring, full, empty, begun = pipe
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    s, parity = 0, 1
    s1, parity1 = 0, 0  # of the tile before
    s2, parity2 = 0, 0
    g = 0
    for it in range(steps):
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
            if g >= 2:
                mbarrier.wait(full.index(s2), parity2)
                s2, parity2 = next_slot(s2, parity2)
            if g >= 1:
                if gl.max(begun.load(L1), 0) < it:
                    mbarrier.wait(full.index(s1), parity1)
                s1, parity1 = next_slot(s1, parity1)
            mbarrier.expect(full.index(s), ROWS * 256)
            # tiles end with their matrix
            r, c = r0 + gl.minimum(row, R - ROWS), c0 + gl.minimum(k * 128, K - 128)
            copy(weights, which, r, c, full.index(s), ring.index(s))
            g += 1
            s, parity = next_slot(s, parity)
            k += 1
            if k == nK:
                k = 0
                row += ROWS
