"""BLAST with V and S fused (❹): two kernels, one intermediate.

Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 4 and figure 6.

A program owns a tile of n×r and loops over the input blocks l: it computes ``z = x_l V_l`` on tensor
cores and adds its outer product with ``S[:, l, r]`` to the tiles of all output blocks, on CUDA cores:

    Z'[k, n, r] += S[k, l, r] z[n, r]          BLOCK_B accumulators of n×r, in registers
    y[n, k·q + ·] = Σ_r Z'[k, n, r] U[k, ·, r] + bias

Z, which ❺ writes and reads, never exists. The price is small tiles: with BLOCK_B·n·r accumulators in
registers x is read ⌈r/BLOCK_R⌉·⌈b/BLOCK_B⌉ times and V ⌈n/BLOCK_N⌉·⌈b/BLOCK_B⌉ times. It wins where the
intermediates cost more than that: memory far slower than arithmetic, small L2.
BLOCK_B < b computes z again for every group of output blocks and affords larger tiles.
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

from blr.kernels.common.available import shared_limit
from blr.kernels.decode.gemm.launch import dot_precision
from blr.kernels.decode.gemm.triton import grouped_tile
from published.parts import fitting, product, spans

ACCUMULATORS = 16 * 64 * 32  # BLOCK_B·BLOCK_N·BLOCK_R: 128 registers a thread in eight warps


@triton.jit
def fused_mix_kernel(
    x, v, s, out, n_tokens, rank, width,
    x_token, x_block, x_p, v_block, v_p, v_r, s_k, s_l, s_r, out_block, out_token,
    BLOCKS: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr, EVEN_P: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``out[k, n, r] = Σ_l s[k, l, r] Σ_p x[n, l, p] v[l, p, r]``; out has stride 1 along r.

    One loop over (l, p tile) keeps the loads in flight across blocks; the mix follows the last of the
    STEPS tiles of p.
    """
    tiles_n, tiles_r = tl.cdiv(n_tokens, BLOCK_N), tl.cdiv(rank, BLOCK_R)
    program = tl.program_id(0)
    tile_n, tile_r = grouped_tile(program % (tiles_n * tiles_r), tiles_n, tiles_r, GROUP)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    k = (program // (tiles_n * tiles_r)) * BLOCK_B + tl.arange(0, BLOCK_B)
    p = tl.arange(0, BLOCK_P)
    far_n, far_r, far_k, far_p = n.to(tl.int64), r.to(tl.int64), k.to(tl.int64), p.to(tl.int64)
    in_n, in_r, in_k = n < n_tokens, r < rank, k < BLOCKS

    x_tile = x + far_n[:, None] * x_token + far_p[None, :] * x_p
    v_tile = v + far_p[:, None] * v_p + far_r[None, :] * v_r
    s_tile = s + far_k[:, None] * s_k + far_r[None, :] * s_r
    mixed = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_R), tl.float32)
    z = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for step in range(0, BLOCKS * STEPS):
        block = step // STEPS + tl.zeros((), tl.int64)
        start = (step % STEPS) * BLOCK_P + tl.zeros((), tl.int64)
        x_mask, v_mask = in_n[:, None], in_r[None, :]
        if not EVEN_P:
            inside = p < width - start
            x_mask, v_mask = x_mask & inside[None, :], v_mask & inside[:, None]
        x_part = tl.load(x_tile + (block * x_block + start * x_p), mask=x_mask, other=0.0)
        v_part = tl.load(v_tile + (block * v_block + start * v_p), mask=v_mask, other=0.0)
        z = tl.dot(x_part, v_part, z, input_precision=PRECISION)
        if step % STEPS == STEPS - 1:
            s_part = tl.load(s_tile + block * s_l, mask=in_k[:, None] & in_r[None, :], other=0.0)
            mixed += s_part.to(tl.float32)[:, None, :] * z[None, :, :]
            z = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    places = far_k[:, None, None] * out_block + far_n[None, :, None] * out_token + far_r[None, None, :]
    mask = in_k[:, None, None] & in_n[None, :, None] & in_r[None, None, :]
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=mask)


def fused_mix_tiles(blocks: int, rank: int, x: Tensor) -> dict[str, int]:
    """Default block sizes of `fused_mix_kernel` for x [n, b·p]: all output blocks in one program.

    Tokens take what the accumulators leave (at b=16, 64 tokens by 32 ranks; at b=4, 128 by 64). A p of
    up to 256 is one tile where three of them fit into shared memory.
    """
    n, width = x.shape[0], x.shape[1] // blocks
    block_b = min(triton.next_power_of_2(blocks), 32)
    block_r = fitting(rank, 16, 64 if block_b <= 8 else 32)
    block_n = fitting(n, 16, max(16, min(128, ACCUMULATORS // (block_b * block_r))))
    block_p = fitting(width, 16, 256 if width <= 256 else 64) if x.element_size() == 2 else 32
    stage = (block_n + block_r) * x.element_size()
    limit = shared_limit(x.device) - 4 * block_n * block_r  # z changes its layout through shared memory
    while block_p > 32 and 3 * stage * block_p > limit:
        block_p //= 2
    return {
        "BLOCK_B": block_b,
        "BLOCK_N": block_n,
        "BLOCK_R": block_r,
        "BLOCK_P": block_p,
        "GROUP": 8,
        "num_warps": 8 if block_b * block_n * block_r > 64 * 128 else 4,
        "num_stages": max(2, min(4, limit // (stage * block_p))),
    }


def fused_mix_product(x: Tensor, S: Tensor, V: Tensor, out: Tensor, **config: int) -> Tensor:
    """``out[k, n, r] = Σ_l S[k, l, r] (x_l V_l)[n, r]`` by `fused_mix_kernel`.

    Args:
        x: [n, b·p], S: [b, b, r], V: [b, p, r], any strides.
        out: [b, n, r], written, stride 1 along r.
        config: overrides of `fused_mix_tiles`.

    Returns:
        `out`.
    """
    blocks, width, rank = V.shape
    n = x.shape[0]
    config = {**fused_mix_tiles(blocks, rank, x), **config}
    tiles = triton.cdiv(n, config["BLOCK_N"]) * triton.cdiv(rank, config["BLOCK_R"])
    fused_mix_kernel[(tiles * triton.cdiv(blocks, config["BLOCK_B"]),)](
        x, V, S, out, n, rank, width,
        x.stride(0), width * x.stride(1), x.stride(1), *V.stride(), *S.stride(), *out.stride()[:2],
        BLOCKS=blocks, STEPS=triton.cdiv(width, config["BLOCK_P"]),
        EVEN_P=width % config["BLOCK_P"] == 0, PRECISION=dot_precision(), **config
    )  # fmt: skip
    return out


def fused_mix(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    first: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
) -> Tensor:
    """BLAST linear layer by ❹: V and S in one kernel, U in a batched product.

    Fastest with V stored [b, r, p] (p contiguous) and U stored [b, q, r].

    Args:
        x: [n, b·p], U: [b, q, r], S: [b, b, r] indexed (k, l, r), V: [b, p, r], any strides.
        bias: [b·q] or None.
        chunk: tokens at a time, default all: the intermediate, b·r·chunk elements, may stay in L2.
        first: block sizes of the fused kernel (BLOCK_B output blocks, BLOCK_N tokens, BLOCK_R,
            BLOCK_P, GROUP, num_warps, num_stages); second: of the product, of `gemm.launch.bmm`.

    Returns:
        [n, b·q] in the dtype of `x`.
    """
    blocks, q, rank = U.shape
    n = x.shape[0]
    y = torch.empty((n, blocks * q), device=x.device, dtype=x.dtype)
    pitch = triton.cdiv(rank, 16) * 16  # whole vectors a row, whatever the rank
    mixed = torch.empty((blocks, min(chunk or n, n), pitch), device=x.device, dtype=x.dtype)
    into = y.unflatten(1, (blocks, q)).transpose(0, 1)  # [b, n, q]
    shift = None if bias is None else bias.unflatten(0, (blocks, q))
    for span in spans(n, chunk):
        part = mixed[:, : span.stop - span.start, :rank]
        fused_mix_product(x[span], S, V, part, **(first or {}))
        product(part, U.mT, into[:, span], shift, **(second or {}))
    return y
