"""Launches one decoding stage: shapes in, grid and tile sizes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tile_shape(
    rows: int, width: int, tokens: int, *, norm: int = 0, size: int = 2, x_size: int = 4
) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps: the best of those timed on an H200.

    Args:
        rows, width: of a block of weights of `size` bytes each. norm: as `norm_kind`, of the input,
            whose elements have `x_size` bytes: what every program reads of them weighs against few
            rows, most of all if it needs the whole row for its scale.
    """
    columns = power_of_two(width)
    if tokens > 2:
        columns = max(min(columns, 256 if size == 2 else 128), 16)
        return {"BR": 32 if rows > 16 else 16, "BK": columns, "num_warps": 4}
    best = (8, 512, 4)
    if norm == 2:
        best = (64, 256, 8)
    elif norm:
        best = (4, 512, 4)
    elif width > 4096:
        best = (4, 1024 if x_size == 4 else 2048, 8)
    elif width > 2048:
        best = (2, 1024, 4) if rows > 2048 else (2, 2048, 8)
    return {"BR": min(best[0], power_of_two(rows)), "BK": min(best[1], columns), "num_warps": best[2]}


def pair_tile(width: int) -> dict[str, int]:
    """Tiles of gate ⊙ up for one or two tokens, whose programs take the same rows of both. {}: those of
    `tile_shape`.

    Chunks of 512 columns are best where they fit; a mostly empty last one costs as much as a full one.
    """
    if not 512 < width <= 2048:
        return {}
    fits = -(-width // 512) * 512 <= 1.1 * width
    return {"BR": 4, "BK": 512, "num_warps": 4} if fits else {"BR": 16, "BK": 128, "num_warps": 4}


def stage_tile(tokens: int, width: int) -> dict[str, int]:
    """Tiles where the two stages of one layer are all there is: smaller ones than between the other
    phases of a model, since nothing else hides how they start and end. {}: those of `tile_shape`."""
    if tokens > 2 or width <= 256:
        return {}
    rows, columns = (4, 512) if width <= 2048 else (1, 1024)
    return {"BR": rows, "BK": min(columns, power_of_two(width)), "num_warps": 4}


def token_slots(tokens: int) -> int:
    """The number of tokens that the kernel for `tokens` is compiled for: 1, 2, 8 or 16."""
    return tokens if tokens <= 2 else max(power_of_two(tokens), 8)


def gemv(
    x: Tensor,
    w: Tensor,
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
    """`reference.gemv` as one kernel, for 1 to 16 tokens.

    Args:
        x: [n, …] with columns of stride 1. w: [B, R, K], any strides; fastest with K of stride 1.
        dtype: of the result (default: that of `x`); ignored when `out` [n, B·R] is given.
        pdl: launched while the kernel before it still runs (compute capability 9 and later): the
            weights must not be written by that kernel.
        config: BR, BK, num_warps in place of `tile_shape`'s.

    Raises:
        ValueError: more than 16 tokens.
    """
    from blr.kernels.gemv.triton import gemv_kernel

    tokens = x.shape[0]
    if tokens > 16:
        raise ValueError(f"gemv: {tokens} tokens; it takes 1 to 16")
    blocks, rows, width = w.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty(tokens, blocks * rows, dtype=dtype or x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = tile_shape(
        *(rows, width, tokens),
        norm=norm_kind(x, w, gain),
        size=w.element_size(),
        x_size=x.element_size(),
    )
    config = {**tile, **config}
    grid = (blocks * -(-rows // config["BR"]),)
    none = x  # stands for an absent tensor: never read
    gemv_kernel[grid](
        *(x, x.stride(0), 0 if x.shape[1] == width else width),
        *(none if gain is None else gain, eps),
        *(w, w.stride(0), w.stride(1), w.stride(2)),
        none if bias is None else bias,
        *(none if residual is None else residual, 0 if residual is None else residual.stride(0)),
        *(out, out.stride(0), tokens, rows, width, blocks, part or rows),
        N=token_slots(tokens),
        NORM=norm_kind(x, w, gain),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACT=activation,
        PDL=pdl,
        **config,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def norm_kind(x: Tensor, w: Tensor, gain: Tensor | None) -> int:
    """0 without a norm, 1 if every block of `w` takes all that the norm is over, else 2."""
    return 0 if gain is None else 1 if x.shape[1] == w.shape[2] else 2


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()
