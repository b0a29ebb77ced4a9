"""Launches one decoding stage with quantized weights: shapes in, grid and tile sizes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.gemv.launch import power_of_two
from blr.kernels.quantized.reference import packed_width

# One or two tokens. Bits -> quads of 16 bytes of a row that one chunk has at most.
CHUNK = {4: 128, 8: 256}
DEEPEST, NARROW = 8, 2  # rows of a thread at most; of less than a chunk, unless in pairs
PROGRAMS = 396  # that a launch has at least, if it can: three for each multiprocessor of an H200
# More tokens, on the tensor cores. Bits -> rows, quads and warps of a program.
MANY = {4: (32, 8, 8), 8: (16, 16, 4)}


def tile_shape(
    rows: int, width: int, tokens: int, bits: int, total: int | None = None, pair: bool = False
) -> dict[str, int]:
    """Rows BR and quads BQ of a program's tile, and its warps.

    A thread that has several rows makes their inputs once; but the programs must fill the GPU: on an
    H200 the stages of an 8B model were fastest with the most rows that leave `PROGRAMS` programs, and
    with `DEEPEST` where rows have several chunks.

    Args:
        rows, width: of a block of weights. total: rows of the whole launch (default: `rows`).
        pair: one of two segments that share programs.
    """
    quads = power_of_two(packed_width(width, bits) // 16)
    if tokens > 2:
        least, chunk, warps = MANY[bits]
        return {"BR": least, "BQ": min(chunk, quads), "num_warps": warps}
    chunk = min(quads, CHUNK[bits])
    warps = max(chunk // 32, 4)
    beside = max(32 * warps // chunk, 1)
    deep = max((total or rows) // (PROGRAMS * beside), 1)
    deep = min(power_of_two(deep + 1) // 2, DEEPEST)  # the power of two at or below
    if quads > chunk:
        deep = DEEPEST
    elif quads < CHUNK[bits] and not pair:
        deep = min(deep, NARROW)
    return {"BR": min(deep * beside, power_of_two(rows)), "BQ": chunk, "num_warps": warps}


def mixed_shape(blocks: int, ranks: int, width: int, bits: int) -> dict[str, int]:
    """The same for a stage that mixes its blocks: BR ranks of every block, BQ quads of each."""
    across = power_of_two(blocks)
    chunk = min(power_of_two(packed_width(width, bits) // 16), max(128 // across, 8))
    warps = min(max(across * chunk // 32, 1), 8)
    return {"BR": min(power_of_two(ranks), 4), "BQ": chunk, "num_warps": warps}


def gemv_quantized(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bits: int,
    K: int,
    *,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    part: int | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    **config: Any,
) -> Tensor:
    """`reference.gemv_quantized` as one kernel, for 1 to 16 tokens; without `mix` (see `mixed.py`).

    Args:
        x: [n, …], any float dtype.
        packed: [B, R, bytes], int8 or uint8, rows of stride-1 bytes that start at multiples of 16.
        scale: [B, R, groups], columns of stride 1.
        K: columns of the weights before padding.
        dtype: of the result (default: that of `x`); ignored when `out` [n, B·R] is given.
        pdl: launched while the kernel before it still runs (compute capability 9 and later).
        config: BR, BQ (at least 8), num_warps in place of `tile_shape`'s.

    Raises:
        ValueError: more than 16 tokens, or `packed` not as wide as K of `bits` asks.
    """
    from blr.kernels.quantized.triton import gemv_kernel

    tokens = x.shape[0]
    if tokens > 16:
        raise ValueError(f"gemv_quantized: {tokens} tokens; it takes 1 to 16")
    words, scale = as_words(packed, bits, K), scale if scale.stride(-1) == 1 else scale.contiguous()
    blocks, rows, _ = words.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty(tokens, blocks * rows, dtype=dtype or x.dtype, device=x.device)
    if tokens == 0:
        return out
    config = {**tile_shape(rows, K, tokens, bits, blocks * rows), **config}
    config = complete(config, config["num_warps"], tokens)
    grid = (blocks * -(-rows // config["BR"]),)
    none = x  # stands for an absent tensor: never read
    gemv_kernel[grid](
        *(x, x.stride(0), 0 if blocks == 1 else K),
        *(none if gain is None else gain, eps),
        *(words, words.stride(0), words.stride(1)),
        *(scale, scale.stride(0), scale.stride(1)),
        none if bias is None else bias,
        *(none if residual is None else residual, 0 if residual is None else residual.stride(0)),
        *(out, out.stride(0), tokens, rows, K, blocks, part or rows),
        N=tokens if tokens <= 2 else 16,
        BITS=bits,
        NORM=gain is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACT=activation,
        ONE=one_chunk(K, bits, config["BQ"]),
        PDL=pdl,
        **config,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def complete(tile: dict[str, int], num_warps: int, tokens: int) -> dict[str, int]:
    """A tile with T, the rows that lie side by side in the lanes of `num_warps`, and no fewer rows."""
    beside = 1 if tokens > 2 else max(32 * num_warps // tile["BQ"], 1)
    return {**tile, "BR": max(tile["BR"], beside), "T": beside, "num_warps": num_warps}


def one_chunk(K: int, bits: int, BQ: int) -> bool:
    """Whether a row of K columns is no more than BQ quads of 16 bytes."""
    return packed_width(K, bits) <= 16 * BQ


def as_words(packed: Tensor, bits: int, K: int) -> Tensor:
    """Packed bytes as int32 [B, R, bytes/4], without a copy where rows allow it.

    Raises ValueError for a row that is not `packed_width(K, bits)` bytes long.
    """
    expected = packed_width(K, bits)
    if packed.shape[-1] != expected:
        raise ValueError(
            f"packed rows of {packed.shape[-1]} bytes: expected {expected} for {K} columns of int{bits}"
        )
    steps = (*packed.stride()[:-1], packed.storage_offset())
    if packed.stride(-1) != 1 or any(step % 4 for step in steps):
        packed = packed.contiguous()
    return packed.view(torch.int32)
