"""The diagonal mix of BLAST, ``w[k, r, n] = Σ_l S[k, l, r] z[l, r, n]``, tokens contiguous.

A program owns all b blocks of its ranks and tokens: each z is read once, and written in place if asked.
"""

import triton
import triton.language as tl


@triton.jit
def mix_dot_kernel(
    z, s, w, tokens, ranks, blocks,
    z_block, z_rank, s_out, s_in, s_rank, w_block, w_rank,
    B: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A batch of b×b products over the ranks on the tensor cores, b padded to B >= 16."""
    rank = tl.program_id(1) * BR + tl.arange(0, BR)
    block = tl.arange(0, B)
    rank_ok, block_ok = rank < ranks, block < blocks
    at = rank[:, None, None] * s_rank + block[None, :, None] * s_out + block[None, None, :] * s_in
    s_ok = rank_ok[:, None, None] & block_ok[None, :, None] & block_ok[None, None, :]
    mix = tl.load(s + at, mask=s_ok, other=0.0)  # [BR, k, l]
    wide = block.to(tl.int64)[None, :, None]
    rows = rank.to(tl.int64)[:, None, None]
    rows_ok = rank_ok[:, None, None] & block_ok[None, :, None]
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows_ok & (token < tokens)[None, None, :]
    here = tl.load(z + wide * z_block + rows * z_rank + token[None, None, :], mask=ok, other=0.0)
    mixed = tl.dot(mix, here, input_precision=PRECISION)
    to = w + wide * w_block + rows * w_rank + token[None, None, :]
    tl.store(to, mixed.to(w.dtype.element_ty), mask=ok)


@triton.jit
def mix_fma_kernel(
    z, s, w, tokens, z_block, z_rank, s_out, s_in, s_rank, w_block, w_rank,
    B: tl.constexpr, OUT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same on the CUDA cores, for k < OUT: S is a scalar for a whole row of tokens, z stays in
    registers."""
    rank = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = token < tokens
    z += rank * z_rank + token
    w += rank * w_rank + token
    s += rank * s_rank
    inputs = ()
    for _ in tl.static_range(B):
        inputs = inputs + (tl.load(z, mask=ok, other=0.0).to(tl.float32),)  # noqa: RUF005
        z += z_block  # step by step: all of them may be more than 32 bits count
    for k in tl.static_range(OUT):
        mixed = tl.zeros([BN], tl.float32)
        for source in tl.static_range(B):
            weight = tl.load(s + k * s_out + source * s_in).to(tl.float32)
            mixed += weight * inputs[source]
        tl.store(w, mixed.to(w.dtype.element_ty), mask=ok)
        w += w_block
