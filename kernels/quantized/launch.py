"""Launches one decoding stage with quantized weights: shapes in, grid and tile sizes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.gemv.launch import power_of_two
from blr.kernels.quantized.reference import packed_width


def tile_shape(rows: int, width: int, tokens: int, bits: int) -> dict[str, int]:
    """Rows and quads of 16 bytes of a program's tile, and its warps.

    Small tiles as those of kernels/gemv: one quad a thread for int8; two for int4, whose inputs take
    twice as much to make. Not yet tuned on a GPU.
    """
    quads = power_of_two(-(-width // 128) * bits)
    if tokens > 2:
        size = {"BR": 16, "num_warps": 4} if bits == 8 else {"BR": 32, "num_warps": 8}
        return {**size, "BQ": min(quads, 8)}
    columns = min(quads, 32 if width <= 2048 else 64)
    total = 128 if bits == 8 else 256
    return {"BR": min(power_of_two(rows), total // columns, 8), "BQ": columns, "num_warps": 4}


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
        config: BR, BQ, num_warps in place of `tile_shape`'s.

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
    config = {**tile_shape(rows, K, tokens, bits), **config}
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
        PDL=pdl,
        **config,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


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
