"""Launches of the products of few tokens: shapes in, tiles out."""

import torch
from torch import Tensor

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemm.launch import dot_precision
from blr.kernels.decode.gemv.launch import launch_options, power_of_two

MOST = 64  # tokens
PROGRAMS = 132  # that one turn of the multiprocessors takes
ADDED = 32  # tokens times parts up to which the second product adds the parts of the first


def slots(tokens: int) -> int:
    """Columns of a tile of `tokens`: 16, 32 or 64. Raises ValueError for more."""
    if tokens > MOST:
        raise ValueError(f"narrow: {tokens} tokens; it takes 1 to {MOST}")
    return max(16, power_of_two(tokens))


def tile_shape(w: Tensor, tokens: int) -> dict[str, int]:
    """Rows, columns, parts, warps and stages for weights [B, R, K]: as many rows as tokens at least,
    which every program reads as well, then as many parts as leave no multiprocessor idle."""
    blocks, rows, width = w.shape
    high = min(max(slots(tokens), 32), max(16, power_of_two(rows)))
    wide = max(16, min(power_of_two(width), 256 if high < 64 else 128))
    programs = blocks * -(-rows // high)
    split = 1
    while 2 * split * programs <= 1.25 * PROGRAMS and width >= 4 * split * wide:
        split *= 2
    return {"BR": high, "BK": wide, "SPLIT": split, "STAGES": 3, "num_warps": 4}


def room(
    blocks: int, rows: int, tokens: int, dtype: torch.dtype, like: Tensor, parts: int = 1
) -> Tensor:
    """An intermediate [parts, B, R, slots], whose rows are as long as their tiles."""
    return torch.empty((parts, blocks, rows, slots(tokens)), dtype=dtype, device=like.device)


def product(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    pdl: bool = False,
    **config: int,
) -> None:
    """``y[p] = w x[·]`` summed over the parts of x, in the parts p of the columns of w.

    Args:
        x: [P, B, K, n], any strides; what is multiplied is the sum over P. w: [B, R, K], columns of
            stride 1. bias: [B·R] or None.
        y: [SPLIT, B·R, n], any strides; SPLIT is 1 with a bias. Of x and y one may be a `room`, whose
            tokens beyond those of the other are zeros.
        part: rows of a block that stay together in y (default: all).
        pdl: as `gemv.launch.product`.
        config: in place of `tile_shape`'s.
    """
    from blr.kernels.decode.narrow.triton import product_kernel

    blocks, rows, width = w.shape
    tokens = min(x.shape[3], y.shape[2])
    config = {**tile_shape(w, tokens), **config, "SPLIT": y.shape[0]}
    grid = (-(-rows // config["BR"]) * config["SPLIT"], blocks)
    run_kernel(
        product_kernel,
        grid,
        *(x, w, w if bias is None else bias, y),
        *(x.shape[3], y.shape[2], rows, width, x.stride(3), x.stride(2), x.stride(1), x.stride(0)),
        *(w.stride(0), w.stride(1), y.stride(2), y.stride(1), y.stride(0)),
        *(part or rows, blocks),
        N=slots(tokens),
        PARTS=x.shape[0],
        BIAS=bias is not None,
        PRECISION=dot_precision(),
        **config,
        **launch_options(pdl),
    )


def add_parts(x: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:
    """``x.sum(0)`` of float32 `room` [P, …] in `dtype`, [1, …], in the order of P."""
    from blr.kernels.decode.narrow.triton import add_parts_kernel

    whole = torch.empty((1, *x.shape[1:]), dtype=dtype, device=x.device)
    run_kernel(
        add_parts_kernel,
        (-(-whole.numel() // 1024),),
        *(x, whole, whole.numel(), x.stride(0)),
        PARTS=len(x),
        BLOCK=1024,
        **launch_options(pdl),
    )
    return whole


def mix(z: Tensor, s: Tensor, pdl: bool, ranks: int = 4) -> None:
    """``z[k, r] = Σ_l s[k, l, r] z[l, r]`` in place, z a `room` [1, b, r, slots], s [b, b, r]."""
    from blr.kernels.decode.narrow.triton import mix_kernel

    _, blocks, rank, width = z.shape
    run_kernel(
        mix_kernel,
        (-(-rank // ranks),),
        *(z, s, z, rank, blocks, z.stride(1), z.stride(2), *s.stride()),
        L=max(16, power_of_two(blocks)),
        N=width,
        BR=ranks,
        PRECISION=dot_precision(),
        num_warps=4,
        **launch_options(pdl),
    )
