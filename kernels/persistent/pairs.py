"""Gated pairs of the persistent kernel: the same rows of gate and up, ``act(gate) ⊙ up``."""

try:
    import triton
    import triton.language as tl

    from blr.kernels.gemv.triton import activate
    from blr.kernels.persistent.access import (
        UP_BIAS,
        UP_BLOCK,
        UP_STRIDES,
        UP_W,
        UP_X,
        UP_X_STRIDES,
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
    from blr.kernels.persistent.rows import biases, gains, scales
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def second(d, A: tl.constexpr, like):
    """(w, w_block, w_row, K, x, x_token, x_block, bias) of the second part of a descriptor."""
    of_w, of_x = tl.load(d + UP_STRIDES), tl.load(d + UP_X_STRIDES)
    w, w_block = typed(tl.load(d + UP_W), like, A), low(tl.load(d + UP_BLOCK)) * A
    x, bias = tl.load(d + UP_X), tl.load(d + UP_BIAS)
    return w, w_block, low(of_w) * A, high(of_w) * A, x, low(of_x) * A, high(of_x) * A, bias


@triton.jit
def both_inputs(x, z, at_x, at_z, x_K, z_K, g, like, single, cols,
                SHARED: tl.constexpr, A: tl.constexpr):  # fmt: skip
    """[BK] inputs of gate and of up, times the weights `g` of the norm."""
    v = inputs(x, like, single, at_x, cols, x_K, False, A) * g
    u = v
    if not SHARED:
        u = inputs(z, like, single, at_z, cols, z_K, False, A) * g
    return v, u


@triton.jit
def pairs_whole(d, ahead, like, single, counter, target,
                N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SHARED: tl.constexpr,
                A: tl.constexpr, HALF: tl.constexpr, ACT: tl.constexpr,
                PLAIN: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """Pairs of rows of K ≤ BK columns; arguments as of `rows.rows_whole`.

    SHARED: both have the same input. HALF: the result has the type of `like`.
    """
    first, end, a, a_row, a_block, rows, a_K = opened(ahead, like, A)
    b, b_block, b_row, b_K, z, z_token, z_block, bias_b = second(d, A, like)
    tiles = tl.cdiv(rows, BR)
    tile_a = weights(a, a_block, a_row, rows, a_K, tiles, first, end, 0, BR, BK, PLAIN)
    tile_b = weights(b, b_block, b_row, rows, b_K, tiles, first, end, 0, BR, BK, PLAIN)
    lane = tl.arange(0, BK)
    x, x_token, x_block, y, y_token, bias_a, gain, eps, width = operands(d, A)
    block = 0 if PLAIN else first // tiles
    at_x, at_z = block * x_block, block * z_block
    g = gains(gain, like, at_x, lane, a_K, A)
    wait(counter, target, SYNC)
    v, u = both_inputs(x, z, at_x, at_z, a_K, b_K, g, like, single, lane, SHARED, A)
    v2, u2 = v, u
    if N == 2:
        v2, u2 = both_inputs(x, z, at_x + x_token, at_z + z_token, a_K, b_K, g, like, single, lane,
                             SHARED, A)  # fmt: skip
    scale, scale2 = scales(x, x_token, single, eps, width, gain != 0, N)
    for t in range(first, end):
        next_a = weights(a, a_block, a_row, rows, a_K, tiles, t + 1, end, 0, BR, BK, PLAIN)
        next_b = weights(b, b_block, b_row, rows, b_K, tiles, t + 1, end, 0, BR, BK, PLAIN)
        out, ok = placed(t, tiles, rows, rows, 1, BR, PLAIN)
        more_a, more_b = biases(bias_a, like, out, ok), biases(bias_b, like, out, ok)
        if not PLAIN:
            here = t // tiles
            if here != block:
                block = here
                at_x, at_z = block * x_block, block * z_block
                g = gains(gain, like, at_x, lane, a_K, A)
                v, u = both_inputs(x, z, at_x, at_z, a_K, b_K, g, like, single, lane, SHARED, A)
                if N == 2:
                    v2, u2 = both_inputs(x, z, at_x + x_token, at_z + z_token, a_K, b_K, g, like,
                                         single, lane, SHARED, A)  # fmt: skip
        gate = activate(tl.sum(tile_a.to(tl.float32) * v[None, :], 1) * scale + more_a, ACT)
        up = tl.sum(tile_b.to(tl.float32) * u[None, :], 1) * scale + more_b
        store(y, like, single, out, gate * up, ok, HALF)
        if N == 2:
            gate = activate(tl.sum(tile_a.to(tl.float32) * v2[None, :], 1) * scale2 + more_a, ACT)
            up = tl.sum(tile_b.to(tl.float32) * u2[None, :], 1) * scale2 + more_b
            store(y, like, single, y_token + out, gate * up, ok, HALF)
        tile_a = next_a
        tile_b = next_b


@triton.jit
def pairs_chunked(d, ahead, like, single, counter, target,
                  N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SHARED: tl.constexpr,
                  A: tl.constexpr, HALF: tl.constexpr, ACT: tl.constexpr,
                  PLAIN: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """Pairs of rows of any number of columns, in chunks of BK; arguments as of `pairs_whole`."""
    first, end, a, a_row, a_block, rows, a_K = opened(ahead, like, A)
    b, b_block, b_row, b_K, z, z_token, z_block, bias_b = second(d, A, like)
    tiles = tl.cdiv(rows, BR)
    chunks = tl.cdiv(tl.maximum(a_K, b_K), BK)
    tile_a = weights(a, a_block, a_row, rows, a_K, tiles, first, end, 0, BR, BK, PLAIN)
    tile_b = weights(b, b_block, b_row, rows, b_K, tiles, first, end, 0, BR, BK, PLAIN)
    x, x_token, x_block, y, y_token, bias_a, gain, eps, width = operands(d, A)
    wait(counter, target, SYNC)
    scale, scale2 = scales(x, x_token, single, eps, width, gain != 0, N)
    for t in range(first, end):
        out, ok = placed(t, tiles, rows, rows, 1, BR, PLAIN)
        here = 0 if PLAIN else t // tiles
        at_x, at_z = here * x_block, here * z_block
        sums_a = tl.zeros([BR, BK], tl.float32)
        sums_b = tl.zeros([BR, BK], tl.float32)
        sums_a2 = tl.zeros([BR, BK], tl.float32)
        sums_b2 = tl.zeros([BR, BK], tl.float32)
        for chunk in range(chunks):
            t_next, c_next = advance(t, chunk, chunks)
            next_a = weights(a, a_block, a_row, rows, a_K, tiles, t_next, end, c_next, BR, BK, PLAIN)
            next_b = weights(b, b_block, b_row, rows, b_K, tiles, t_next, end, c_next, BR, BK, PLAIN)
            cols = chunk * BK + tl.arange(0, BK)
            g = gains(gain, like, at_x, cols, a_K, A)
            v, u = both_inputs(x, z, at_x, at_z, a_K, b_K, g, like, single, cols, SHARED, A)
            sums_a += tile_a.to(tl.float32) * v[None, :]
            sums_b += tile_b.to(tl.float32) * u[None, :]
            if N == 2:
                v, u = both_inputs(x, z, at_x + x_token, at_z + z_token, a_K, b_K, g, like, single,
                                   cols, SHARED, A)  # fmt: skip
                sums_a2 += tile_a.to(tl.float32) * v[None, :]
                sums_b2 += tile_b.to(tl.float32) * u[None, :]
            tile_a = next_a
            tile_b = next_b
        more_a, more_b = biases(bias_a, like, out, ok), biases(bias_b, like, out, ok)
        gate = activate(tl.sum(sums_a, 1) * scale + more_a, ACT)
        store(y, like, single, out, gate * (tl.sum(sums_b, 1) * scale + more_b), ok, HALF)
        if N == 2:
            gate = activate(tl.sum(sums_a2, 1) * scale2 + more_a, ACT)
            up = tl.sum(sums_b2, 1) * scale2 + more_b
            store(y, like, single, y_token + out, gate * up, ok, HALF)
