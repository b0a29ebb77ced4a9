"""Launches the products of packed weights (`fused.py`): shapes in; grid, tiles and workspace out."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.quantized.formats import PLANES
from blr.kernels.layers.packed.unpacking import instructions, pieces_of

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
SHARED = 226 << 10  # bytes of shared memory that the rings of a program may take


class Tile(NamedTuple):
    """Sizes of a program: rows BR, tokens NP, programs that SPLIT a row, STAGES of its rings (pieces of a step)."""

    BR: int
    NP: int
    SPLIT: int
    STAGES: int
    num_warps: int


class Correction(NamedTuple):
    """``U z``: u [R, r] in the dtype of x, or int8 with `scale` [R]; z [n, r]."""

    u: Tensor
    scale: Tensor | None
    z: Tensor


def steps_of(K: int, bits: int, group: int) -> int:
    """Steps of a row: of sixteen words of its lowest plane."""
    return -(-(-(-K // group) * (group * PLANES[bits][0] // 32)) // 16)


def ring_bytes(bits: int, tile: Tile) -> int:
    """Bytes of the rings of a program: inputs of STAGES pieces, words of the steps on their way."""
    kept = -(-(tile.STAGES - 2) // pieces_of(bits)) + 1
    columns = 32 if bits == 8 else 64
    return tile.STAGES * tile.NP * columns * 2 + kept * tile.BR * 64 * len(PLANES[bits])


def even_split(steps: int, split: int) -> int:
    """The most parts up to `split` of which none is empty."""
    split = max(min(split, steps), 1)
    while (split - 1) * -(-steps // split) >= steps:
        split -= 1
    return split


def default_tile(rows: int, K: int, bits: int, group: int, tokens: int) -> Tile:
    """Sizes for a shape."""
    most = 256 if bits == 4 or bits == 8 else 128
    slots = 8
    while slots < min(tokens, most):
        slots *= 2
    high = 128
    programs = -(-rows // high) * -(-tokens // slots)
    steps = steps_of(K, bits, group)
    split = even_split(steps, max(min(264 // programs, steps // 4, 8), 1))
    tile = Tile(high, slots, split, 4, 8)
    while tile.STAGES < 10 and ring_bytes(bits, tile._replace(STAGES=tile.STAGES + 2)) <= SHARED:
        tile = tile._replace(STAGES=tile.STAGES + 2)
    return tile


def product(
    x: Tensor, packed: Tensor, scale: Tensor, bits: int, group: int, bias: Tensor | None = None,
    correction: Correction | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """``x Wᵀ + bias + z Uᵀ`` [n, R] in one launch.

    Args:
        x: [n, K] in half precision, columns of stride 1. packed:
            [R, bytes]. scale: [R, groups] in the dtype of x. bias: [R]. tile: default `default_tile`'s.
    """
    from blr.kernels.layers.packed.fused import product_kernel
    from blr.kernels.layers.packed.triton import ordered

    (tokens, K), rows = x.shape, len(packed)
    x = ordered(x, bits, group)
    tile = tile or default_tile(rows, K, bits, group, tokens)
    tile = tile._replace(SPLIT=even_split(steps_of(K, bits, group), tile.SPLIT))
    words = packed.view(torch.int32)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    tiles = -(-rows // tile.BR) * -(-tokens // tile.NP)
    partial = counter = y
    if tile.SPLIT > 1:
        size = tiles * tile.SPLIT * tile.BR * tile.NP
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counter = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    u, u_scale, z = correction or (x, None, x)
    ranks = u.shape[1] if correction else 0
    name = NAMES[x.dtype]
    launch(
        product_kernel,
        (tiles * tile.SPLIT,),
        (
            *(x, x.stride(0), words, words.stride(0), scale, scale.stride(0)),
            *(x if bias is None else bias, u, u.stride(0), x if u_scale is None else u_scale),
            *(z, z.stride(0), y, y.stride(0), partial, counter, tokens, rows, K, ranks),
        ),
        {
            "BITS": bits,
            "GROUP": group,
            "ASM": instructions(bits, name),
            "BR": tile.BR,
            "NP": tile.NP,
            "SPLIT": tile.SPLIT,
            "STAGES": tile.STAGES,
            "WARPS": tile.num_warps,
            "BIAS": bias is not None,
            "FULL": steps_of(K, bits, group) * 512 // PLANES[bits][0] == -(-K // group) * group,
            "RANKS": max(1 << (ranks - 1).bit_length(), 16) if ranks else 0,
        },
        num_warps=tile.num_warps,
    )
    return y
