"""Segmented matrix-vector products for decoding: a few tokens against weights read once.

The sums of a token are those that it has alone, in the same order. Derivation: ../README.md.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

WIDE = tl.constexpr(2048)  # inputs of a row that a program squares at once


@triton.jit
def weight_tile(w, rows, rows_ok, cols, K, w_row, w_col):
    """[BR, BK] weights, zero outside."""
    mask = rows_ok[:, None] & (cols < K)[None, :]
    return tl.load(w + rows[:, None] * w_row + cols[None, :] * w_col, mask=mask, other=0.0)


@triton.jit
def input_chunk(x, cols, K):
    """[BK] inputs of one token in float32, zero outside."""
    return tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)


@triton.jit
def row_scale(x, width, eps):
    """1 / root mean square of all inputs of one token."""
    square = tl.zeros([WIDE], tl.float32)
    for start in range(0, width, WIDE):
        v = input_chunk(x, start + tl.arange(0, WIDE), width)
        square += v * v
    return tl.rsqrt(tl.sum(square, 0) / width + eps)


@triton.jit
def rows_by_fma(
    s, x, width, gain, eps, w, rows, rows_ok,
    BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Products of `rows` with tokens on the CUDA cores: [BR] in float32 of each.

    x: the block's columns, of the `width` ones of the stage `s`. w: first weight of the block. gain: [K]
    of an RMS norm over the width if NORM, whose scale multiplies the sums: NORM = 1 if the block takes
    all columns, else 2.
    """
    lane = tl.arange(0, BK)
    tile = weight_tile(w, rows, rows_ok, lane, s.K, s.w_row, s.w_col)
    if WAIT:
        gdc_wait()
    sums = (tl.zeros([BR, BK], tl.float32),) * TOKENS
    squares = (tl.zeros([BK], tl.float32),) * TOKENS
    for start in range(0, s.K, BK):
        cols = start + lane
        following = weight_tile(w, rows, rows_ok, cols + BK, s.K, s.w_row, s.w_col)
        added, squared = (), ()
        for token in tl.static_range(TOKENS):
            v = input_chunk(x + token * s.x_token, cols, s.K)
            square = squares[token]
            if NORM > 0:
                if NORM == 1:
                    square += v * v
                v *= input_chunk(gain, cols, s.K)
            added += (sums[token] + tile.to(tl.float32) * v[None, :],)
            squared += (square,)
        sums, squares = added, squared
        tile = following
    results = ()
    for token in tl.static_range(TOKENS):
        found = tl.sum(sums[token], 1)
        if NORM == 1:
            found *= tl.rsqrt(tl.sum(squares[token], 0) / width + eps)
        if NORM == 2:
            found *= row_scale(s.x + token * s.x_token, width, eps)
        results += (found,)
    return results


@triton.jit
def gelu(value):
    """``v Φ(v)``, by ``1 − Φ(v) ≈ ½ p(t) exp(−v²/2)`` of v ≥ 0, within 2e-7 (Abramowitz and Stegun,
    Handbook of Mathematical Functions, 7.1.26): nothing cancels in the tail, and half of `erf`'s
    registers."""
    size = tl.abs(value)
    t = 1.0 / (1.0 + 0.2316418882 * size)
    p = t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    p = t * (0.127414796 + t * (-0.142248368 + p))
    return tl.maximum(value, 0.0) - size * p * tl.exp(-0.5 * value * value)


@triton.jit
def activate(value, ACT: tl.constexpr):
    """The activation named ACT of float32 values."""
    if ACT == "silu":
        return value / (1.0 + tl.exp(-value))
    if ACT == "gelu":
        return gelu(value)
    if ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value / (1.0 + tl.exp(-2.0 * inner))
    if ACT == "relu":
        return tl.maximum(value, 0.0)
    return value


@triton.jit
def tile_start(tile, s, BR: tl.constexpr):
    """The block of tile number `tile` of a stage, and its first row there."""
    tiles = tl.cdiv(s.rows, BR)
    return tile // tiles, (tile % tiles) * BR


@triton.jit
def outputs(s, block, rows):
    """Where the results of rows of a block are."""
    return (rows // s.part) * (s.blocks * s.part) + block * s.part + rows % s.part


@triton.jit
def bias_of(s, out, ok, BIAS: tl.constexpr):
    """[BR] of the outputs `out` in float32, zero if there is none."""
    constant = tl.zeros([out.shape[0]], tl.float32)
    if BIAS:
        constant = tl.load(s.bias + out, mask=ok, other=0.0).to(tl.float32)
    return constant


@triton.jit
def stage_rows(tile, s, gain, eps, T: tl.constexpr, WAIT: tl.constexpr):
    """Products of tile number `tile` of a stage: (sums [BR] of every token, outputs [BR], valid).

    s, T: `launch.Stage` and `launch.Tile`.
    """
    block, start = tile_start(tile, s, T.BR)
    rows = start + tl.arange(0, T.BR)
    ok = rows < s.rows
    w = s.w + block.to(tl.int64) * s.w_block
    width = s.blocks * s.x_block if T.NORM == 2 else s.K
    x = s.x + block * s.x_block
    gain += block * s.x_block
    out = outputs(s, block, rows)
    constant = bias_of(s, out, ok, T.BIAS)
    sums = rows_by_fma(
        s, x, width, gain, eps, w, rows.to(tl.int64), ok, T.BR, T.BK, T.NORM, T.TOKENS, WAIT
    )  # fmt: skip
    TOKENS: tl.constexpr = T.TOKENS
    found = ()
    for token in tl.static_range(TOKENS):
        found += (sums[token] + constant,)
    return found, out, ok


@triton.jit
def store_rows(y, found, out, ok, ADD: tl.constexpr):
    """Store results of a token, or add them to what is there."""
    if ADD:
        found += tl.load(y + out, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + out, found.to(y.dtype.element_ty), mask=ok)


@triton.jit
def mixed_segment(
    tile, s, gain, eps,
    L: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """BR ranks of up to L blocks and their mix: ``y[k, r] = Σ_l s[k, l, r] (w[l, r, :] · x_l)``."""
    rank = tile * BR + tl.arange(0, BR)
    block = tl.arange(0, L)
    lane = tl.arange(0, BK)
    rank_ok = rank < s.rows
    block_ok = block < s.blocks
    at = s.w + (block.to(tl.int64)[:, None] * s.w_block + rank.to(tl.int64)[None, :] * s.w_row)
    ok = block_ok[:, None] & rank_ok[None, :]
    there = (lane < s.K)[None, None, :]
    first = tl.load(
        at[:, :, None] + lane[None, None, :] * s.w_col, mask=ok[:, :, None] & there, other=0.0
    )
    at_mix = block[:, None, None] * s.mix_out + block[None, :, None] * s.mix_in
    at_mix += rank[None, None, :] * s.mix_rank
    mix = tl.load(s.mix + at_mix, mask=block_ok[:, None, None] & ok[None, :, :], other=0.0).to(
        tl.float32
    )
    if WAIT:
        gdc_wait()
    sums = tl.zeros([L, BR, BK], tl.float32)
    square = tl.zeros([L, BK], tl.float32)
    for start in range(0, s.K, BK):
        cols = start + lane
        after = cols + BK
        there = (after < s.K)[None, None, :]
        following = at[:, :, None] + after[None, None, :] * s.w_col
        following = tl.load(following, mask=ok[:, :, None] & there, other=0.0)
        at_x = block[:, None] * s.K + cols[None, :]
        x_ok = block_ok[:, None] & (cols < s.K)[None, :]
        v = tl.load(s.x + at_x, mask=x_ok, other=0.0).to(tl.float32)
        if NORM:
            square += v * v
            v *= tl.load(gain + at_x, mask=x_ok, other=0.0).to(tl.float32)
        sums += first.to(tl.float32) * v[:, None, :]
        first = following
    mixed = tl.sum(mix * tl.sum(sums, 2)[None, :, :], 1)
    if NORM:
        mixed *= tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / (s.K * s.blocks) + eps)
    to = s.y + block[:, None] * s.rows + rank[None, :]
    tl.store(to, mixed.to(s.y.dtype.element_ty), mask=ok)


@triton.jit
def run_segment(tile, s, gain, eps, T: tl.constexpr, ADD: tl.constexpr, WAIT: tl.constexpr):
    """One tile of a segment, stored, or added to what its result holds; of T.MIX blocks that it mixes,
    if there are any."""
    if T.MIX > 0:
        mixed_segment(tile, s, gain, eps, T.MIX, T.BR, T.BK, T.NORM, WAIT)
    else:
        found, out, ok = stage_rows(tile, s, gain, eps, T, WAIT)
        TOKENS: tl.constexpr = T.TOKENS
        for token in tl.static_range(TOKENS):
            store_rows(s.y + token * s.y_token, found[token], out, ok, ADD)


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
    gate, out, ok = stage_rows(program, s0, gain, eps, T0, PDL)
    up, out, ok = stage_rows(program, s1, gain, eps, T1, False)
    TOKENS: tl.constexpr = T1.TOKENS
    for token in tl.static_range(TOKENS):
        store_rows(s1.y + token * s1.y_token, activate(gate[token], ACT) * up[token], out, ok, False)


@triton.jit
def gate_kernel(
    both, both_token, y, y_token, width, BK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    """A part of a token's row a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    ok = column < width
    both += tl.program_id(0) * both_token
    gate = tl.load(both + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + width + column, mask=ok, other=0.0).to(tl.float32)
    y += tl.program_id(0) * y_token
    tl.store(y + column, (activate(gate, ACT) * up).to(y.dtype.element_ty), mask=ok)
