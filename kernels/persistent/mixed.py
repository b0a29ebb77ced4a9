"""The first stage of BLAST in the persistent kernel: ranks of all blocks, and their mix by S."""

try:
    import triton
    import triton.language as tl

    from blr.kernels.persistent.access import (
        MIX,
        MIX_BLOCKS,
        MIX_RANK,
        PARTS,
        advance,
        high,
        low,
        opened,
        operands,
        typed,
        wait,
    )
    from blr.kernels.persistent.rows import scales
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def rank_weights(w, w_block, w_row, ranks, blocks, K, t, end, chunk,
                 L: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """[L, BR, BK] weights of a chunk of all blocks' ranks of tile `t`, zero where there are none: none
    from tile `end` on."""
    block = tl.arange(0, L)
    rank = t * BR + tl.arange(0, BR)
    cols = chunk * BK + tl.arange(0, BK)
    ok = (block < blocks)[:, None] & (rank < tl.where(t < end, ranks, 0))[None, :]
    ok = ok[:, :, None] & (cols < K)[None, None, :]
    at = block.to(tl.int64)[:, None] * w_block + rank.to(tl.int64)[None, :] * w_row
    at = w + at[:, :, None] + cols[None, None, :]
    return tl.load(at, mask=ok, other=0.0, cache_modifier=".cg")


@triton.jit
def block_inputs(x, offset, gain, like, single, cols, K, blocks,
                 L: tl.constexpr, A: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """[L, BK] inputs of all blocks in float32, times the weights of the norm if there is one; stored
    with the type of `like` if HALF."""
    block = tl.arange(0, L)
    at = block[:, None] * K + cols[None, :]
    ok = (block < blocks)[:, None] & (cols < K)[None, :]
    x = typed(x, like, A) if HALF else typed(x, single, A)
    v = tl.load(x + offset + at, mask=ok, other=0.0).to(tl.float32)
    ok = ok & (cols < tl.where(gain != 0, K, 0))[None, :]
    return v * tl.load(typed(gain, like, A) + at, mask=ok, other=1.0).to(tl.float32)


@triton.jit
def mix_sums(sums, mix, scale):
    """[L, BR]: ``Σ_l mix[k, l, r] sums[l, r, :]`` times a scale."""
    return tl.sum(mix * tl.sum(sums, 2)[None, :, :], 1) * scale


@triton.jit
def mixed(d, ahead, like, single, counter, target,
          N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, A: tl.constexpr,
          HALF: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """``y[k, r] = Σ_l s[k, l, r] (w[l, r, :] · x_l)`` of up to L blocks in tiles of BR ranks.

    Arguments as of `rows.rows_whole`.
    """
    first, end, w, w_row, w_block, ranks, K = opened(ahead, like, A)
    chunks = tl.cdiv(K, BK)
    blocks = high(tl.load(d + PARTS))
    tile = rank_weights(w, w_block, w_row, ranks, blocks, K, first, end, 0, L, BR, BK)
    x, x_token, _x_block, y, y_token, _bias, gain, eps, width = operands(d, A)
    s = tl.load(d + MIX).to(like.dtype)
    of_s = tl.load(d + MIX_BLOCKS)
    s_out, s_in, s_rank = low(of_s), high(of_s), low(tl.load(d + MIX_RANK))
    block = tl.arange(0, L)
    lane = tl.arange(0, BK)
    there = (block < blocks)[:, None] & (block < blocks)[None, :]
    wait(counter, target, SYNC)
    scale, scale2 = scales(x, x_token, single, eps, width, gain != 0, N)
    for t in range(first, end):
        rank = t * BR + tl.arange(0, BR)
        at = block[:, None, None] * s_out + block[None, :, None] * s_in + rank[None, None, :] * s_rank
        ok = there[:, :, None] & (rank < ranks)[None, None, :]
        mix = tl.load(s + at, mask=ok, other=0.0).to(tl.float32)
        sums = tl.zeros([L, BR, BK], tl.float32)
        sums2 = tl.zeros([L, BR, BK], tl.float32)
        for chunk in range(chunks):
            t_next, c_next = advance(t, chunk, chunks)
            following = rank_weights(w, w_block, w_row, ranks, blocks, K, t_next, end, c_next,
                                     L, BR, BK)  # fmt: skip
            cols = chunk * BK + lane
            v = block_inputs(x, 0, gain, like, single, cols, K, blocks, L, A, HALF)
            sums += tile.to(tl.float32) * v[:, None, :]
            if N == 2:
                v = block_inputs(x, x_token, gain, like, single, cols, K, blocks, L, A, HALF)
                sums2 += tile.to(tl.float32) * v[:, None, :]
            tile = following
        to = y.to(single.dtype) + block[:, None] * ranks + rank[None, :]
        ok = (block < blocks)[:, None] & (rank < ranks)[None, :]
        tl.store(to, mix_sums(sums, mix, scale), mask=ok)
        if N == 2:
            tl.store(to + y_token, mix_sums(sums2, mix, scale2), mask=ok)
