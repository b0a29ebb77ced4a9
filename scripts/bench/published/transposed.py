"""BLAST in three transposed kernels, all on tensor cores (❺).

Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 4 and figure 7.

The three sums of a BLAST layer run over p, over the input block l and over r, so in the usual order
either the mix or the last product reads its batch index from the contiguous axis. Multiplied from
the left, with the tokens n contiguous throughout, each stage has its batch outside:

    Z[r, l, n]  = Σ_p V[l, ·, r] x[n, l·p + ·]      batch l
    Z'[k, r, n] = Σ_l S[k, l, r] Z[r, l, n]         batch r
    y[n, k·q + ·] = Σ_r Z'[k, r, n] U[k, ·, r]      batch k, stored token by token

No tensor is permuted. The mix moves 2·b·n·r elements in and as many out and does b² products for
every (n, r): memory-bound on tensor cores. Rows of n begin at whole 128-byte lines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError(
        "the BLAST kernels need triton: install it or use the reference variant"
    ) from error

from blr.kernels.decode.gemm.launch import dot_precision
from published.parts import fitting, product, spans

LINE = 64  # elements: 128 bytes of 16-bit numbers
MIX_ELEMENTS = 8192  # of a mixed tile: 64 accumulators a thread in four warps


@triton.jit
def mix_kernel(
    z, s, out, rank, columns,
    z_rank, z_block, s_k, s_l, s_r, out_block, out_rank,
    BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    TENSOR: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``out[k, r, n] = Σ_l s[k, l, r] z[r, l, n]``; z and out have stride 1 along n.

    One program: BLOCK_R ranks, BLOCK_N tokens, all k and l (BLOCK_B ≥ BLOCKS, a power of two).
    TENSOR: a batch over r of [k, l]·[l, n] dots; else one multiply-add over k for every l.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    n = (program % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = (program // tiles_n) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.arange(0, BLOCK_B)
    far_r, far_block = r.to(tl.int64), block.to(tl.int64)
    in_n, in_r, in_block = n < columns, r < rank, block < BLOCKS

    if TENSOR:
        z_tile = tl.load(
            z + far_r[:, None, None] * z_rank + far_block[None, :, None] * z_block + n[None, None, :],
            mask=in_r[:, None, None] & in_block[None, :, None] & in_n[None, None, :],
            other=0.0,
        )  # [r, l, n]
        s_tile = tl.load(
            s
            + far_r[:, None, None] * s_r
            + far_block[None, :, None] * s_k
            + far_block[None, None, :] * s_l,
            mask=in_r[:, None, None] & in_block[None, :, None] & in_block[None, None, :],
            other=0.0,
        )  # [r, k, l]
        mixed = tl.dot(s_tile, z_tile, input_precision=PRECISION)  # [r, k, n]
        places = (
            far_r[:, None, None] * out_rank + far_block[None, :, None] * out_block + n[None, None, :]
        )
        mask = in_r[:, None, None] & in_block[None, :, None] & in_n[None, None, :]
    else:
        mixed = tl.zeros((BLOCK_B, BLOCK_R, BLOCK_N), tl.float32)  # [k, r, n]
        for step in tl.static_range(BLOCKS):
            z_tile = tl.load(
                z + far_r[:, None] * z_rank + tl.full((), step, tl.int64) * z_block + n[None, :],
                mask=in_r[:, None] & in_n[None, :],
                other=0.0,
            )  # [r, n]
            s_tile = tl.load(
                s + far_block[:, None] * s_k + tl.full((), step, tl.int64) * s_l + far_r[None, :] * s_r,
                mask=in_block[:, None] & in_r[None, :],
                other=0.0,
            )  # [k, r]
            mixed += s_tile.to(tl.float32)[:, :, None] * z_tile.to(tl.float32)[None, :, :]
        places = (
            far_block[:, None, None] * out_block + far_r[None, :, None] * out_rank + n[None, None, :]
        )
        mask = in_block[:, None, None] & in_r[None, :, None] & in_n[None, None, :]
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=mask)


def mix_tiles(blocks: int, rank: int, n: int) -> dict[str, int]:
    """Default block sizes of the mix; blocks are padded to 16, a tensor core's K, when above 8."""
    block_b = max(16, triton.next_power_of_2(blocks)) if blocks > 8 else triton.next_power_of_2(blocks)
    block_n = fitting(n, 16, 64 if blocks > 8 else 128)
    block_r = fitting(rank, 1, max(1, MIX_ELEMENTS // (block_b * block_n)))
    return {"BLOCK_R": min(block_r, 16), "BLOCK_N": block_n, "BLOCK_B": block_b, "num_warps": 4}


def mix(z: Tensor, S: Tensor, out: Tensor, **config: int) -> Tensor:
    """``out[k, r, n] = Σ_l S[k, l, r] z[r, l, n]`` by `mix_kernel`.

    Args:
        z: [r, b, n] and out: [b, r, n], written; both with stride 1 along n.
        S: [b, b, r], any strides.
        config: overrides of `mix_tiles`.

    Returns:
        `out`.
    """
    rank, blocks, columns = z.shape
    config = {**mix_tiles(blocks, rank, columns), **config}
    grid = (triton.cdiv(rank, config["BLOCK_R"]) * triton.cdiv(columns, config["BLOCK_N"]),)
    mix_kernel[grid](
        z, S, out, rank, columns,
        *z.stride()[:2], *S.stride(), *out.stride()[:2],
        BLOCKS=blocks, TENSOR=config["BLOCK_B"] >= 16, PRECISION=dot_precision(), **config
    )  # fmt: skip
    return out


def transposed(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    first: dict[str, Any] | None = None,
    middle: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
) -> Tensor:
    """BLAST linear layer by ❺: ``Vᵀ x``, the mix, ``U``, each a batched product with n contiguous.

    Fastest with V stored [b, r, p] (p contiguous) and U stored [b, q, r].

    Args:
        x: [n, b·p], U: [b, q, r], S: [b, b, r] indexed (k, l, r), V: [b, p, r], any strides.
        bias: [b·q] or None.
        chunk: tokens at a time, default all: both intermediates, 2·b·r·chunk elements, may stay in L2.
        first, last: block sizes of the products, of `gemm.launch.bmm`; in `first` BM runs over r and
            BN over n, in `last` BM over n and BN over q.
        middle: block sizes of the mix (BLOCK_R, BLOCK_N, num_warps); BLOCK_B ≥ 16 puts it on tensor
            cores.

    Returns:
        [n, b·q] in the dtype of `x`.
    """
    blocks, q, rank = U.shape
    n = x.shape[0]
    y = torch.empty((n, blocks * q), device=x.device, dtype=x.dtype)
    pitch = triton.cdiv(min(chunk or n, n), LINE) * LINE
    z = torch.empty((rank, blocks, pitch), device=x.device, dtype=x.dtype)
    mixed = torch.empty((blocks, rank, pitch), device=x.device, dtype=x.dtype)
    per_block, into = (t.unflatten(1, (blocks, -1)).transpose(0, 1) for t in (x, y))  # [b, n, p or q]
    shift = None if bias is None else bias.unflatten(0, (blocks, q))
    for span in spans(n, chunk):
        part, mixed_part = (t[:, :, : span.stop - span.start] for t in (z, mixed))
        product(V.mT, per_block[:, span].mT, part.transpose(0, 1), **(first or {}))
        mix(part, S, mixed_part, **(middle or {}))
        product(mixed_part.mT, U.mT, into[:, span], shift, **(last or {}))
    return y
