"""Row products of the persistent kernel: a program's tiles of one segment of a phase.

A tile is [BR, BK] weights. The next tile (or chunk of one) is always in registers on the way while
one is multiplied; the first was loaded before the barrier.
"""

try:
    import triton
    import triton.language as tl

    from blr.kernels.gemv.triton import row_scale
    from blr.kernels.persistent.access import (
        PARTS,
        Y_TOKEN,
        advance,
        high,
        inputs,
        low,
        opened,
        operands,
        placed,
        store,
        typed,
        wait,
        weights,
    )
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def scales(x, x_token, single, eps, width, norm, N: tl.constexpr):
    """1 / root mean square of the input of each of two tokens; 1 if there is no norm."""
    first = 1.0
    second = 1.0
    if norm:
        first = row_scale(x.to(single.dtype), width, eps)
        if N == 2:
            second = row_scale(x.to(single.dtype) + x_token, width, eps)
    return first, second


@triton.jit
def gains(gain, like, offset, cols, K, A: tl.constexpr):
    """[BK] weights of the norm in float32, ones if there is none."""
    there = cols < tl.where(gain != 0, K, 0)
    return tl.load(typed(gain, like, A) + offset + cols, mask=there, other=1.0).to(tl.float32)


@triton.jit
def only(ok, out, flag):
    """The mask `ok` of the outputs `out` if `flag`, else nothing."""
    return ok & (out < tl.where(flag, 0x7FFFFFFF, 0))


@triton.jit
def biases(bias, like, out, ok):
    """[BR] in float32, zero if there is none."""
    return tl.load(bias.to(like.dtype) + out, mask=only(ok, out, bias != 0), other=0.0).to(tl.float32)


@triton.jit
def addends(bias, y, y_token, like, single, out, ok, add, N: tl.constexpr):
    """[BR] that are added to the sums of each token: the bias, and what the result holds."""
    first = tl.zeros([out.shape[0]], tl.float32)
    second = first
    if add | (bias != 0):
        first = biases(bias, like, out, ok)
        second = first
        there = y.to(single.dtype) + out
        held = only(ok, out, add)
        first += tl.load(there, mask=held, other=0.0, cache_modifier=".cg")
        if N == 2:
            second += tl.load(there + y_token, mask=held, other=0.0, cache_modifier=".cg")
    return first, second


@triton.jit
def rows_whole(d, ahead, like, single, counter, target,
               N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, A: tl.constexpr,
               HALF: tl.constexpr, PLAIN: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """Rows of K ≤ BK columns: the input stays in registers for all tiles of a block.

    d: descriptor; ahead: its first words, `fields.Ahead`.
    """
    first, end, w, w_row, w_block, rows, K = opened(ahead, like, A)
    tiles = tl.cdiv(rows, BR)
    tile = weights(w, w_block, w_row, rows, K, tiles, first, end, 0, BR, BK, PLAIN)
    lane = tl.arange(0, BK)
    x, x_token, x_block, y, y_token, bias, gain, eps, width = operands(d, A)
    part, blocks = low(tl.load(d + PARTS)), high(tl.load(d + PARTS))
    add = high(tl.load(d + Y_TOKEN)) != 0
    block = 0 if PLAIN else first // tiles
    g = gains(gain, like, block * x_block, lane, K, A)
    wait(counter, target, SYNC)
    v = inputs(x, like, single, block * x_block, lane, K, HALF, A) * g
    u = v
    if N == 2:
        u = inputs(x, like, single, x_token + block * x_block, lane, K, HALF, A) * g
    scale, scale2 = scales(x, x_token, single, eps, width, gain != 0, N)
    for t in range(first, end):
        following = weights(w, w_block, w_row, rows, K, tiles, t + 1, end, 0, BR, BK, PLAIN)
        out, ok = placed(t, tiles, rows, part, blocks, BR, PLAIN)
        more, more2 = addends(bias, y, y_token, like, single, out, ok, add, N)
        if not PLAIN:
            here = t // tiles
            if here != block:
                block = here
                g = gains(gain, like, block * x_block, lane, K, A)
                v = inputs(x, like, single, block * x_block, lane, K, HALF, A) * g
                if N == 2:
                    u = inputs(x, like, single, x_token + block * x_block, lane, K, HALF, A) * g
        sums = tl.sum(tile.to(tl.float32) * v[None, :], 1)
        store(y, like, single, out, sums * scale + more, ok, False)
        if N == 2:
            sums = tl.sum(tile.to(tl.float32) * u[None, :], 1)
            store(y, like, single, y_token + out, sums * scale2 + more2, ok, False)
        tile = following


@triton.jit
def rows_chunked(d, ahead, like, single, counter, target,
                 N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, A: tl.constexpr,
                 HALF: tl.constexpr, PLAIN: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """Rows of any number of columns, in chunks of BK, with the inputs of the next chunk on the way
    as its weights are. Arguments as of `rows_whole`."""
    first, end, w, w_row, w_block, rows, K = opened(ahead, like, A)
    tiles = tl.cdiv(rows, BR)
    chunks = tl.cdiv(K, BK)
    tile = weights(w, w_block, w_row, rows, K, tiles, first, end, 0, BR, BK, PLAIN)
    lane = tl.arange(0, BK)
    x, x_token, x_block, y, y_token, bias, gain, eps, width = operands(d, A)
    part, blocks = low(tl.load(d + PARTS)), high(tl.load(d + PARTS))
    add = high(tl.load(d + Y_TOKEN)) != 0
    offset = 0 if PLAIN else (first // tiles) * x_block
    g = gains(gain, like, offset, lane, K, A)
    wait(counter, target, SYNC)
    v = inputs(x, like, single, offset, lane, K, HALF, A) * g
    u = v
    if N == 2:
        u = inputs(x, like, single, x_token + offset, lane, K, HALF, A) * g
    scale, scale2 = scales(x, x_token, single, eps, width, gain != 0, N)
    for t in range(first, end):
        out, ok = placed(t, tiles, rows, part, blocks, BR, PLAIN)
        more, more2 = addends(bias, y, y_token, like, single, out, ok, add, N)
        sums = tl.zeros([BR, BK], tl.float32)
        sums2 = tl.zeros([BR, BK], tl.float32)
        for chunk in range(chunks):
            t_next, c_next = advance(t, chunk, chunks)
            following = weights(w, w_block, w_row, rows, K, tiles, t_next, end, c_next, BR, BK, PLAIN)
            offset = 0 if PLAIN else tl.where(t_next < end, t_next // tiles, 0) * x_block
            cols = c_next * BK + lane
            g = gains(gain, like, offset, cols, K, A)
            v_next = inputs(x, like, single, offset, cols, K, HALF, A) * g
            sums += tile.to(tl.float32) * v[None, :]
            if N == 2:
                sums2 += tile.to(tl.float32) * u[None, :]
                u = inputs(x, like, single, x_token + offset, cols, K, HALF, A) * g
            tile = following
            v = v_next
        store(y, like, single, out, tl.sum(sums, 1) * scale + more, ok, False)
        if N == 2:
            store(y, like, single, y_token + out, tl.sum(sums2, 1) * scale2 + more2, ok, False)
