"""Whole layers of 1 to 64 tokens: low-rank, BLAST, Monarch. The references are those of the layers."""

from collections.abc import Mapping
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemm.launch import dot_precision
from blr.kernels.decode.gemv.launch import launch_options, power_of_two

MOST = 64  # tokens
PROGRAMS = 132  # that one turn of the multiprocessors takes
ADDED = 32  # tokens times parts up to which the second product adds the parts of the first
PARTED = 64  # columns of a tile whose inputs come in parts, all of which are in shared memory
RANKS = 4  # of a program that mixes


class Config(TypedDict, total=False):
    """`first` and `second`, tiles of the products, as `tile_shape`. `add`, where parts are added:
    "second" product or "between"; default: by their number."""

    first: dict[str, int]
    second: dict[str, int]
    add: str


def lowrank(
    x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None, **config: Unpack[Config]
) -> Tensor:
    """Two launches; the first product in as many parts of its columns as fill the GPU.

    Args:
        x: [n, i]. U: [o, r], V: [i, r], fastest with unit strides over r and i. bias: [o] or None.

    Returns:
        [n, o].
    """
    n = len(x)
    down, up = _columns(V.t().unsqueeze(0)), _columns(U.unsqueeze(0))
    first = {**tile_shape(down, n), **config.get("first", {})}
    parts = first["SPLIT"]
    z = _room(1, V.shape[1], n, torch.float32 if parts > 1 else x.dtype, x, parts)
    product(_tokens(x, 1), down, z[:, 0], config=first)
    usual = "second" if parts * n <= ADDED else "between"
    if parts > 1 and config.get("add", usual) == "between":
        z = _add_parts(z, x.dtype, supports_pdl(x.device))
    return _last(z, up, bias, x, **config)


def monarch(
    x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None, **config: Unpack[Config]
) -> Tensor:
    """Two launches; the first stores in the order that the second reads. Arguments as `lowrank`."""
    part = V.shape[2] // V.shape[0]
    return _last(_first(x, V, part, **config), _columns(U), bias, x, **config)


def blast(
    x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None, **config: Unpack[Config]
) -> Tensor:
    """Three launches: V, the mix, U. Arguments as `lowrank`, S [b, b, r]."""
    z = _first(x, V, None, **config)
    _mix(z, S, supports_pdl(x.device))
    return _last(z, _columns(U), bias, x, **config)


def _first(x: Tensor, V: Tensor, part: int | None, **config: Unpack[Config]) -> Tensor:
    """z [1, b, r, slots] of V [b, p, r]."""
    blocks, _, rank = V.shape
    z = _room(blocks, rank, len(x), x.dtype, x)
    tile = config.get("first", {})
    product(_tokens(x, blocks), _columns(V.mT), z.flatten(1, 2), part=part, config=tile)
    return z


def _last(z: Tensor, w: Tensor, bias: Tensor | None, x: Tensor, **config: Unpack[Config]) -> Tensor:
    """y [n, B·R] of the last product, w [B, R, K] of z [P, B, K, n]."""
    y = torch.empty(len(x), w.shape[0] * w.shape[1], dtype=x.dtype, device=x.device)
    tile = {**({"BK": PARTED} if len(z) > 1 else {}), **config.get("second", {})}
    product(z, w, y.t().unsqueeze(0), bias, config=tile)
    return y


def _tokens(x: Tensor, blocks: int) -> Tensor:
    """x [n, B·K] as [1, B, K, n]."""
    return x.unflatten(1, (blocks, -1)).permute(1, 2, 0).unsqueeze(0)


def _columns(w: Tensor) -> Tensor:
    """w [B, R, K] with columns of stride 1."""
    return w if w.stride(2) == 1 else w.contiguous()


def _slots(tokens: int) -> int:
    """Columns of a tile of `tokens`: 16, 32 or 64. Raises ValueError for more."""
    if tokens > MOST:
        raise ValueError(f"narrow: {tokens} tokens; it takes 1 to {MOST}")
    return max(16, power_of_two(tokens))


def tile_shape(w: Tensor, tokens: int) -> dict[str, int]:
    """Rows, columns, parts, warps and stages for weights [B, R, K]: as many rows as tokens at least,
    which every program reads as well, then as many parts as leave no multiprocessor idle."""
    blocks, rows, width = w.shape
    high = min(max(_slots(tokens), 32), max(16, power_of_two(rows)))
    wide = max(16, min(power_of_two(width), 256 if high < 64 else 128))
    programs = blocks * -(-rows // high)
    split = 1
    while 2 * split * programs <= 1.25 * PROGRAMS and width >= 4 * split * wide:
        split *= 2
    return {"BR": high, "BK": wide, "SPLIT": split, "STAGES": 3, "num_warps": 4}


def _room(
    blocks: int, rows: int, tokens: int, dtype: torch.dtype, like: Tensor, parts: int = 1
) -> Tensor:
    """An intermediate [parts, B, R, slots], whose rows are as long as their tiles."""
    return torch.empty((parts, blocks, rows, _slots(tokens)), dtype=dtype, device=like.device)


def product(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    config: Mapping[str, int],
) -> None:
    """``y[p] = w x[·]`` summed over the parts of x, in the parts p of the columns of w.

    Args:
        x: [P, B, K, n], any strides; what is multiplied is the sum over P. w: [B, R, K], columns of
            stride 1. bias: [B·R] or None.
        y: [SPLIT, B·R, n], any strides; SPLIT is 1 with a bias. Of x and y one may have `_slots`, whose
            tokens beyond those of the other are zeros.
        part: rows of a block that stay together in y (default: all). config: in place of `tile_shape`'s.
    """
    from blr.kernels.decode.narrow.triton import product_kernel

    blocks, rows, width = w.shape
    tokens = min(x.shape[3], y.shape[2])
    tile = {**tile_shape(w, tokens), **config, "SPLIT": y.shape[0]}
    run_kernel(
        product_kernel,
        (-(-rows // tile["BR"]) * tile["SPLIT"], blocks),
        *(x, w, w if bias is None else bias, y),
        *(x.shape[3], y.shape[2], rows, width, x.stride(3), x.stride(2), x.stride(1), x.stride(0)),
        *(w.stride(0), w.stride(1), y.stride(2), y.stride(1), y.stride(0)),
        *(part or rows, blocks),
        **{"N": _slots(tokens), "PARTS": x.shape[0], "BIAS": bias is not None},
        PRECISION=dot_precision(),
        **tile,
        **launch_options(supports_pdl(w.device)),
    )


def _add_parts(x: Tensor, dtype: torch.dtype, pdl: bool) -> Tensor:
    """``x.sum(0)`` of float32 [P, …] in `dtype`, [1, …], in the order of P."""
    from blr.kernels.decode.narrow.triton import add_parts_kernel

    whole = torch.empty((1, *x.shape[1:]), dtype=dtype, device=x.device)
    given = (x, whole, whole.numel(), x.stride(0))
    options = {"PARTS": len(x), "BLOCK": 1024, **launch_options(pdl)}
    run_kernel(add_parts_kernel, (-(-whole.numel() // 1024),), *given, **options)
    return whole


def _mix(z: Tensor, s: Tensor, pdl: bool) -> None:
    """``z[k, r] = Σ_l s[k, l, r] z[l, r]`` in place, z [1, b, r, slots], s [b, b, r]."""
    from blr.kernels.decode.narrow.triton import mix_kernel

    _, blocks, rank, width = z.shape
    run_kernel(
        mix_kernel,
        (-(-rank // RANKS),),
        *(z, s, z, rank, blocks, z.stride(1), z.stride(2), *s.stride()),
        **{"L": max(16, power_of_two(blocks)), "N": width, "BR": RANKS},
        PRECISION=dot_precision(),
        num_warps=4,
        **launch_options(pdl),
    )
