"""Launches the products of packed weights (`fused.py`): shapes in; grid, tiles and workspace out."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.quantized.formats import PLANES
from blr.kernels.layers.packed.unpacking import instructions, pieces_of

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
MOST = {8: 256, 4: 768, 3: 512, 2: 768}  # tokens up to which it is faster than a plain copy and cuBLAS
SHARED = 226 << 10  # bytes of shared memory that the rings of a program may take


class ProductTile(NamedTuple):
    """Sizes of a program.

    BR: rows of the weight. NP: tokens. SPLIT: programs that share a row. STAGES: pieces held at once.
    """

    BR: int
    NP: int
    SPLIT: int
    STAGES: int
    num_warps: int


def steps_of(K: int, bits: int, group: int) -> int:
    """How many steps a row of K columns takes; a step has sixteen words of the lowest plane."""
    return -(-(-(-K // group) * (group * PLANES[bits][0] // 32)) // 16)


def ring_bytes(bits: int, tile: ProductTile) -> int:
    """Bytes of shared memory of a program: inputs of STAGES pieces and words of their steps."""
    kept = -(-(tile.STAGES - 2) // pieces_of(bits)) + 1
    columns = 32 if bits == 8 else 64
    return tile.STAGES * tile.NP * columns * 2 + kept * tile.BR * 64 * len(PLANES[bits])


def even_split(steps: int, split: int) -> int:
    """The most parts up to `split` of which none is empty."""
    split = max(min(split, steps), 1)
    while (split - 1) * -(-steps // split) >= steps:
        split -= 1
    return split


@functools.cache
def default_tile(rows: int, K: int, bits: int, group: int, tokens: int) -> ProductTile:
    """The sizes that were the fastest on one H200 (scripts/log, 2026-11-27) for a weight [rows, K]."""
    slots = 8
    while slots < min(tokens, 256):
        slots *= 2
    high, programs = (64, 264) if slots <= (128 if bits == 3 else 32) else (128, 132)
    if slots <= 16:
        programs = 1024  # bound by memory: many small ones hide its latency
    split, tiles = 1, -(-rows // high) * -(-tokens // slots)
    while split < 8 and 2 * split * tiles <= programs:
        split *= 2
    split = even_split(steps_of(K, bits, group), split)
    tile = ProductTile(high, slots, split, 6, high // 16)
    while ring_bytes(bits, tile) > SHARED:
        tile = tile._replace(STAGES=tile.STAGES - 1)
    return tile


def takes(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int) -> bool:
    """Whether `product` can compute a layer's product and is the fastest way to."""
    if not 0 < len(x) <= MOST[bits] or x.dtype not in NAMES or scale.dtype != x.dtype:
        return False
    if bias is not None and bias.dtype != x.dtype:
        return False
    even = packed.data_ptr() % 16 == 0 and packed.stride(0) % 16 == 0 and packed.stride(1) == 1
    return bool(len(packed)) and even and x.stride(1) == 1 and has_wgmma(x.device)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether the kernel runs on a device: it needs a Hopper GPU and a Triton with Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import blr.kernels.layers.packed.fused  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def product(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, bits: int, group: int,
    curved: bool = True,
) -> Tensor:  # fmt: skip
    """``x Wᵀ + bias`` [n, R] in the dtype of x, by one kernel, for what `takes` allows.

    Args:
        x: [n, K], bfloat16 or float16, columns of stride 1. packed: [R, bytes], as
            `decode/quantized/reference.py` says. scale: [R, groups] and bias: [R], in the dtype of x.
            curved: which of the two grids of 3 bits.
    """
    from blr.kernels.layers.packed.fused import product_kernel
    from blr.kernels.layers.packed.triton import ordered

    (tokens, K), rows = x.shape, len(packed)
    x = ordered(x, bits, group)
    tile = default_tile(rows, K, bits, group, tokens)
    words = packed.view(torch.int32)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    tiles = -(-rows // tile.BR) * -(-tokens // tile.NP)
    partial = counter = y
    if tile.SPLIT > 1:
        size = tiles * tile.SPLIT * tile.BR * tile.NP
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counter = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    name = NAMES[x.dtype]
    launch(
        product_kernel,
        (tiles * tile.SPLIT,),
        (
            *(x, x.stride(0), words, words.stride(0), scale, scale.stride(0)),
            *(x if bias is None else bias, y, y.stride(0), partial, counter, tokens, rows, K),
        ),
        {
            "BITS": bits,
            "GROUP": group,
            "ASM": instructions(bits, curved, name),
            "BR": tile.BR,
            "NP": tile.NP,
            "SPLIT": tile.SPLIT,
            "STAGES": tile.STAGES,
            "WARPS": tile.num_warps,
            "BIAS": bias is not None,
            "FULL": steps_of(K, bits, group) * 512 // PLANES[bits][0] == -(-K // group) * group,
        },
        num_warps=tile.num_warps,
    )
    return y
