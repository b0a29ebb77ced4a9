"""Segmented matrix-vector products with weights in 8, 4, 3 or 2 bits, dequantized in registers.

A program walks `BR` rows in chunks of `BQ` quads of 16 bytes. One thread loads each; its inputs
serve its quads of BR / T rows. Derivation: ../README.md.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate, bias_of, outputs, row_scale, store_rows, tile_start
from blr.kernels.decode.quantized.bytes import byte_sums
from blr.kernels.decode.quantized.plain import plain_rows, plain_sums, spoiled
from blr.kernels.decode.quantized.words import (
    lane_columns,
    load_chunk,
    quad_sums,
    row_quads,
    row_words,
    scale_at,
    tile_places,
    words_left,
)


@triton.jit
def chunk_products(chunk, inputs, start, T: tl.constexpr):
    """[RT, lanes, 1] products of a chunk and [1, lanes, 4] squares of its inputs."""
    tile, factor = chunk
    x, gain, past = inputs
    column = start * T.COLUMNS
    if T.BYTES > 0:
        return byte_sums(tile, factor, x, gain, past, column, T)
    else:
        return quad_sums(tile, factor, x, gain, past, column, T)


@triton.jit
def rows_by_fma(chunk, words, scales, inputs, end, T: tl.constexpr):
    """Products of rows with a token on the CUDA cores, and squares of its inputs before the gain, in
    float32 and still to be summed: [RT, lanes, 1], [1, lanes, 4].

    chunk: what `load_chunk` gave of words and scales; T.ONE: there is no other. inputs: pointers
    [lanes·4] to those for field 0 and to their gain (used if T.NORM), and how far each is past the end
    of the row (valid if negative). end: quads of the row.
    """
    if T.ONE:
        sums, square = chunk_products(chunk, inputs, 0, T)
    else:
        tile, factor = chunk
        lanes: tl.constexpr = factor.shape[1]
        sums = tl.zeros([factor.shape[0], lanes, 1], tl.float32)
        square = tl.zeros([1, lanes, 4], tl.float32)
        for start in range(0, end, T.BQ):
            following, next_factor = load_chunk(words, scales, start + T.BQ, T, lanes)
            found, squares = chunk_products((tile, factor), inputs, start, T)
            sums += found
            square += squares
            tile = following
            factor = next_factor
    return sums, square


@triton.jit
def row_sums(sums, BQ: tl.constexpr):
    """[BR] of [RT, T·BQ, 1]."""
    RT: tl.constexpr = sums.shape[0]
    T: tl.constexpr = sums.shape[1] // BQ
    return tl.reshape(tl.sum(tl.reshape(sums, (RT, T, BQ)), 2), (RT * T,))


@triton.jit
def whole_sum(square):
    """The sum of a tile [1, lanes, 4]."""
    return tl.sum(tl.sum(tl.sum(square, 2), 1), 0)


@triton.jit
def narrow_rows(s, out, ok, T: tl.constexpr):
    """U [BR, RANKS] of the rows `out` in float32, and where their z is [BR, RANKS] and there; nothing
    of a stage that nothing corrects. It does not depend on inputs: read before they are there."""
    if T.RANKS > 0:
        rank = tl.arange(0, T.RANKS)
        there = ok[:, None] & (rank < s.ranks)[None, :]
        u = tl.load(s.u + (out[:, None] * s.u_row + rank[None, :]), mask=there, other=0).to(tl.float32)
        if T.U_GROUP > 0:
            at = out[:, None] * s.u_scale_row + (rank // T.U_GROUP)[None, :]
            u *= tl.load(s.u_scale + at, mask=there, other=0.0).to(tl.float32)
        return u, (out // s.u_part * s.ranks)[:, None] + rank[None, :], there
    else:
        return ()


@triton.jit
def correction(s, narrow, T: tl.constexpr):
    """[BR], 0 where nothing corrects. narrow: of `narrow_rows`."""
    if T.RANKS > 0:
        u, at, there = narrow
        return tl.sum(u * tl.load(s.z + at, mask=there, other=0.0), 1)
    else:
        return 0.0


@triton.jit
def tile_weights(tile, s, T: tl.constexpr):
    """The block of tile number `tile`, its first row there, and where that row's words and scales are:
    within a tile, offsets of 32 bits do."""
    block, start = tile_start(tile, s, T.BR)
    w = s.w + (block.to(tl.int64) * s.w_block + start.to(tl.int64) * (s.w_row * T.UNIT))
    scale = s.scale + (block.to(tl.int64) * s.scale_block + start.to(tl.int64) * s.scale_row)
    return block, start, w, scale


@triton.jit
def plain_tile(tile, s, T: tl.constexpr):
    """Sums [BR] of tile number `tile` by plain numbers."""
    block, start, w, scale = tile_weights(tile, s, T)
    places = w, s.w_row * T.UNIT, scale, s.scale_row, s.x + block * s.x_block
    return plain_rows(*places, s.rows - start, s.K, T)


@triton.jit
def stage_start(tile, s, T: tl.constexpr):
    """What does not depend on the inputs of tile number `tile` of a stage (see `stage_products`):
    (first chunk, words, scales, block, outputs [BR], valid, what corrects them)."""
    block, start, w, scale = tile_weights(tile, s, T)
    rows = s.rows - start
    words, scales = tile_places(w, s.w_row * T.UNIT, scale, s.scale_row, rows, s.K, T)
    chunk = load_chunk(words, scales, 0, T, T.T * T.BQ)
    row = tl.arange(0, T.BR)
    out = outputs(s, block, start + row)
    return chunk, words, scales, block, out, row < rows, narrow_rows(s, out, row < rows, T)


@triton.jit
def stage_products(started, s, gain, T: tl.constexpr):
    """Products of the tile that `stage_start` started, for `stage_rows`.

    s, T: `launch.QuantizedStage` and `launch.QuantizedTile`.
    """
    chunk, words, scales, block = started[0], started[1], started[2], started[3]
    x = s.x + block * s.x_block
    if T.NORM == 2:
        gain += block * s.x_block
    at = lane_columns(T.T * T.BQ, T)
    return rows_by_fma(chunk, words, scales, (x + at, gain + at, at - s.K), row_quads(s.K, T), T)


@triton.jit
def stage_rows(products, started, s, eps, T: tl.constexpr):
    """What `stage_products` gave as (sums, what is added to them, outputs, valid)."""
    out, ok, narrow = started[4], started[5], started[6]
    sums, square = products
    constant = bias_of(s, out, ok, T.BIAS)
    found = row_sums(sums, T.BQ)
    if T.NORM == 1:
        copies: tl.constexpr = square.shape[1] // T.BQ
        found *= tl.rsqrt(whole_sum(square) / (copies * s.K) + eps)
    if T.NORM == 2:
        found *= row_scale(s.x, s.blocks * s.K, eps)
    return found, correction(s, narrow, T) + constant, out, ok


@triton.jit
def mixed_rows(chunk, words, scales, tile, s, gain, eps, mix, L: tl.constexpr, T: tl.constexpr):
    """One token: [BR, L] in float32, ranks by output blocks.

    chunk, words, scales: as `load_chunk` has them. mix: [rank, k, l] in float32.
    """
    K, blocks = s.K, s.blocks
    LANES: tl.constexpr = L * T.BQ
    block = tl.arange(0, LANES * 4) // (4 * T.BQ)
    at = lane_columns(LANES, T)
    x_at = s.x + (block * K + at)
    inputs = x_at, gain + (block * K + at), tl.where(block < blocks, at - K, at)
    sums, square = rows_by_fma(chunk, words, scales, inputs, row_quads(K, T), T)
    z = tl.sum(tl.reshape(sums, (sums.shape[0], L, T.BQ)), 2)
    if T.NORM == 0 and not T.EXACT:
        z = mended_mix(z, tile, s, L, T)
    mixed = tl.sum(mix * z[:, None, :], 2)
    if T.NORM:
        mixed *= tl.rsqrt(whole_sum(square) / (blocks * K) + eps)
    return mixed


@triton.jit
def mixed_places(index, rank, ranks, row_step, block_step, blocks, L: tl.constexpr, T: tl.constexpr):
    """Of quads number `index` of a tile of ranks by L blocks by BQ quads, ranks from `rank` on: where
    their rows begin, their place in the row, and whether there is such a row."""
    here = rank + index // (L * T.BQ)
    block = index // T.BQ % L
    at = here.to(tl.int64) * row_step + block.to(tl.int64) * block_step
    return at, index % T.BQ, (here < ranks) & (block < blocks)


@triton.jit
def mended_mix(z, tile, s, L: tl.constexpr, T: tl.constexpr):
    """Sums [BR, L] of ranks by blocks, those found or, if not all are finite, `plain_sums`."""
    if spoiled(tl.sum(z, 1)):
        index, rank = tl.arange(0, T.BR * L), tile * T.BR
        at, _quad, there = mixed_places(
            index * T.BQ, rank, s.rows, s.w_row * T.UNIT, s.w_block, s.blocks, L, T
        )
        scale, _quad, there = mixed_places(
            index * T.BQ, rank, s.rows, s.scale_row, s.scale_block, s.blocks, L, T
        )
        found = plain_sums(s.w + at, s.scale + scale, s.x + index % L * s.K, there, s.K, T)
        z = tl.reshape(found, (T.BR, L))
    return z


@triton.jit
def mixed_segment(
    tile, s, gain, eps, L: tl.constexpr, T: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """Tile number `tile` of a stage of up to L blocks."""
    BR: tl.constexpr = T.BR
    LANES: tl.constexpr = L * T.BQ
    PARTS: tl.constexpr = 1 if T.WORDS >= 4 else 2
    K, ranks, blocks = s.K, s.rows, s.blocks
    index = tl.arange(0, BR * LANES * 4)
    w_row = s.w_row * T.UNIT
    at, quad, there = mixed_places(index // 4, tile * BR, ranks, w_row, s.w_block, blocks, L, T)
    left = tl.where(there, words_left(quad, index % 4, K, T), 0)
    words = row_words(s.w + at, quad, index % 4, left, T)
    index = tl.arange(0, BR * LANES * PARTS)
    at, quad, there = mixed_places(
        index // PARTS, tile * BR, ranks, s.scale_row, s.scale_block, blocks, L, T
    )
    group = scale_at(quad, index % PARTS, T)
    scales = s.scale + (at + group), tl.where(there, tl.cdiv(K, T.GROUP) - group, 0)
    first = load_chunk(words, scales, 0, T, LANES)
    rank = tile * BR + tl.arange(0, BR)
    rank_ok = rank < ranks
    block = tl.arange(0, L)
    ok = rank_ok[:, None] & (block < blocks)[None, :]
    at_mix = rank[:, None, None] * s.mix_rank + block[None, :, None] * s.mix_out
    at_mix += block[None, None, :] * s.mix_in
    mix_ok = ok[:, :, None] & (block < blocks)[None, None, :]
    mix = tl.load(s.mix + at_mix, mask=mix_ok, other=0.0).to(tl.float32)
    if WAIT:
        gdc_wait()
    mixed = mixed_rows(first, words, scales, tile, s, gain, eps, mix, L, T)
    to = s.y + block[None, :] * ranks + rank[:, None]
    tl.store(to, mixed.to(s.y.dtype.element_ty), mask=ok)


@triton.jit
def run_segment(tile, s, gain, eps, T: tl.constexpr, ADD: tl.constexpr, WAIT: tl.constexpr):
    """One tile of a segment, stored, or added to what its result holds; of T.MIX blocks that it mixes,
    if there are any."""
    if T.MIX > 0:
        mixed_segment(tile, s, gain, eps, T.MIX, T, WAIT)
    else:
        started = stage_start(tile, s, T)
        if WAIT:
            gdc_wait()
        found, more, out, ok = stage_rows(stage_products(started, s, gain, T), started, s, eps, T)
        if ADD:
            more += tl.load(s.y + out, mask=ok, other=0.0).to(tl.float32)
        store_rows(s.y, found + more, out, ok, False)
        if T.NORM == 0 and not T.EXACT:  # noqa: SIM102 (known when compiled)
            if spoiled(found):
                store_rows(s.y, plain_tile(tile, s, T) + more, out, ok, False)


@triton.jit
def grouped_kernel(
    s0, s1, s2, programs0, programs1, gain, eps,
    COUNT: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, s0, gain, eps, T0, ADD, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, s1, gain, eps, T1, ADD, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, s2, gain, eps, T2, ADD, PDL)


@triton.jit
def dual_kernel(
    s0, s1, gain, eps, T0: tl.constexpr, T1: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    started0 = stage_start(program, s0, T0)
    started1 = stage_start(program, s1, T1)
    if PDL:
        gdc_wait()
    gate, one, out, ok = stage_rows(stage_products(started0, s0, gain, T0), started0, s0, eps, T0)
    up, two, out, ok = stage_rows(stage_products(started1, s1, gain, T1), started1, s1, eps, T1)
    store_rows(s1.y, activate(gate + one, ACT) * (up + two), out, ok, False)
    if T1.NORM == 0 and not T1.EXACT:  # noqa: SIM102 (known when compiled)
        if spoiled(up):
            found = activate(plain_tile(program, s0, T0) + one, ACT)
            store_rows(s1.y, found * (plain_tile(program, s1, T1) + two), out, ok, False)
