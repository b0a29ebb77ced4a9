"""Products of weights with 1 to 64 tokens on the tensor cores, whose narrow side the tokens are.

Sums of parts of the columns are added in their order: results never depend on which program came first.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import weight_tile


@triton.jit
def input_tile(
    x, cols, end, token, tokens, x_token, x_col, x_part, PARTS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """[BK, N] inputs of all tokens, zero outside; the sum of PARTS of them, `x_part` from one to the
    next, rounded once."""
    ok = (cols < end)[:, None] & (token < tokens)[None, :]
    at = x + cols.to(tl.int64)[:, None] * x_col + token[None, :] * x_token
    if PARTS == 1:
        return tl.load(at, mask=ok, other=0.0).to(TYPE)
    else:
        total = tl.load(at, mask=ok, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(at + part * x_part, mask=ok, other=0.0)
        return total.to(TYPE)


@triton.jit
def product_kernel(
    x, w, bias, y,
    x_tokens, y_tokens, rows, K, x_token, x_col, x_block, x_part, w_block, w_row,
    y_token, y_row, y_part, part, blocks,
    N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``y[row', t] = Σ_k w[block, row, k] x[block, k, t] + bias[row']``, sums in float32.

    row' is row of its block with `part` rows of every block in turn, as `gemv.triton.outputs`.
    STAGES: tiles of weights on their way to shared memory. Tokens of x beyond `x_tokens` count as
    zeros; of y, `y_tokens` are stored.
    """
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(1).to(tl.int64)
    tile, piece = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    row = tile * BR + tl.arange(0, BR)
    ok = row < rows
    lane = tl.arange(0, BK)
    token = tl.arange(0, N)
    span = tl.cdiv(tl.cdiv(K, SPLIT), BK) * BK
    begin = piece * span
    end = tl.minimum(begin + span, K)
    x += block * x_block
    w += block * w_block
    wide = row.to(tl.int64)
    kind = w.dtype.element_ty
    sums = tl.zeros([BR, N], tl.float32)
    if PDL:
        gdc_wait()
    for start in tl.range(begin, end, BK, num_stages=STAGES):
        here = weight_tile(w, wide, ok, start + lane, end, w_row, 1)
        v = input_tile(x, start + lane, end, token, x_tokens, x_token, x_col, x_part, PARTS, kind)
        sums = tl.dot(here, v, sums, input_precision=PRECISION)
    out = (row // part) * (blocks * part) + tl.program_id(1) * part + row % part
    if BIAS:
        sums += tl.load(bias + out, mask=ok, other=0.0).to(tl.float32)[:, None]
    to = y + piece * y_part + out.to(tl.int64)[:, None] * y_row + token[None, :] * y_token
    tl.store(to, sums.to(y.dtype.element_ty), mask=ok[:, None] & (token < y_tokens)[None, :])


@triton.jit
def add_parts_kernel(
    x, y, size, x_part, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``y = Σ_part x[part]`` of `size` numbers each, in the order of parts, rounded once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    total = tl.load(x + at, mask=ok, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * x_part + at, mask=ok, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=ok)


@triton.jit
def mix_kernel(
    z, s, w, ranks, blocks, z_block, z_rank, s_out, s_in, s_rank,
    L: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``w[k, r, t] = Σ_l s[k, l, r] z[l, r, t]`` of BR ranks, z and w alike [blocks, ranks, N]: a
    batch of products of L >= 16 blocks on the tensor cores, the rest of L zeros."""
    if PDL:
        gdc_launch_dependents()
    rank = tl.program_id(0) * BR + tl.arange(0, BR)
    block = tl.arange(0, L)
    token = tl.arange(0, N)
    rank_ok, block_ok = (rank < ranks)[:, None, None], block < blocks
    at = rank[:, None, None] * s_rank + block[None, :, None] * s_out + block[None, None, :] * s_in
    there = rank_ok & block_ok[None, :, None] & block_ok[None, None, :]
    mix = tl.load(s + at, mask=there, other=0.0)  # [BR, k, l]
    if PDL:
        gdc_wait()
    at = rank[:, None, None] * z_rank + block[None, :, None] * z_block + token[None, None, :]
    ok = rank_ok & block_ok[None, :, None]
    mixed = tl.dot(mix, tl.load(z + at, mask=ok, other=0.0), input_precision=PRECISION)
    tl.store(w + at, mixed.to(w.dtype.element_ty), mask=ok)
