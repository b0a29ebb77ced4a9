"""Inputs of products: made from sums, in two half-precision parts, in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blr.kernels.decode.token.sums import number

NORM = gl.constexpr(1)  # flags: the input is normed, gated, put together from parts of attention
GATE = gl.constexpr(2)
PARTS = gl.constexpr(4)
AT_ONCE = gl.constexpr(16)  # chunks of 128 inputs
TIMES = gl.constexpr(2)  # of so many at most

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
def operand(inputs, slot, ZERO, RHS: gl.constexpr):
    """[128, 8]: the inputs of a tile, high parts in four columns and low parts in four."""
    v = gl.permute(gl.reshape(inputs.index(slot).load(PLACES), [2, 4, 4, 2, 2, 2]), (1, 3, 4, 2, 5, 0))
    v = gl.convert_layout(gl.reshape(v, [128, 2]), gl.SliceLayout(2, WIDENED), assert_trivial=True)
    b, _ = gl.broadcast(gl.expand_dims(v, 2), ZERO)
    return gl.convert_layout(gl.reshape(b, [128, 8]), RHS, assert_trivial=True)


@gluon.jit
def placed(a):
    """[rows, 128] in the order of `PLACES`."""
    return gl.reshape(
        gl.permute(gl.reshape(a, [a.shape[0], 4, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5)), a.shape
    )


@gluon.jit
def joined(parts, xo, xu, column, inside, T: gl.constexpr):
    """Columns of attention's results, put together from those of SPLIT programs a head. parts: sums from
    xo on, largest exponents and sums of weights from xu on."""
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
def stage(inputs, memory, words, nx, factor, T: gl.constexpr):
    """Inputs of nx chunks of 128 columns, normed ones times `factor`, from the words' chunk on; behind
    the last comes the first. The last ends with the row: what others have of it is zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    sums, parts, gains = memory
    kc, nK, K, flags = words[1], words[2], words[3] * 8, words[11]
    xo, xu = words[4] * 8, words[5] * 8
    row = gl.arange(0, AT_ONCE, gl.SliceLayout(1, L))
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, L)), 0)
    for i in range(0, nx, AT_ONCE):
        k = kc + i + row
        k = gl.expand_dims(gl.where(k >= nK, k - nK, k), 1)
        at = gl.minimum(k * 128, K - 128) + c
        inside = gl.expand_dims(i + row < nx, 1) & (at >= k * 128)
        if flags & PARTS:
            a = joined(parts, xo, xu, at, inside, T)
        else:
            a = number(sums + xo + at, inside)
            if flags & NORM:
                a *= gl.load(gains + words[12] * T.HIDDEN + at, mask=inside, other=0.0) * factor
            if flags & GATE:
                a = a / (1 + gl.exp(-a)) * number(sums + xu + at, inside)
        h = a.to(inputs.dtype)
        inputs.index(i // AT_ONCE).slice(0, 128, dim=1).store(placed(h))
        low = (a - h.to(gl.float32)).to(inputs.dtype)
        inputs.index(i // AT_ONCE).slice(128, 128, dim=1).store(placed(low))
