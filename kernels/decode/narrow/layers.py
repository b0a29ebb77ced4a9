"""Whole layers of 1 to 64 tokens: low-rank, BLAST, Monarch. The references are those of the layers."""

from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.decode.narrow.launch import ADDED, add_parts, mix, product, room, tile_shape

Config = dict[str, Any]
PARTED = 64  # columns of a tile whose inputs come in parts, all of which are in shared memory


def lowrank(
    x: Tensor,
    U: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    first: Config | None = None,
    second: Config | None = None,
    add: str = "",
) -> Tensor:
    """Two launches; the first product in as many parts of its columns as fill the GPU.

    Args:
        x: [n, i]. U: [o, r], V: [i, r], fastest with unit strides over r and i. bias: [o] or None.
        first, second: tiles of the products, as `launch.tile_shape`.
        add: where parts are added: "second" product or "between"; default: by their number.

    Returns:
        [n, o].
    """
    n, pdl = len(x), supports_pdl(x.device)
    down, up = _columns(V.t().unsqueeze(0)), _columns(U.unsqueeze(0))
    config = {**tile_shape(down, n), **(first or {})}
    parts = config["SPLIT"]
    kind = torch.float32 if parts > 1 else x.dtype
    z = room(1, V.shape[1], n, kind, x, parts)
    product(_tokens(x, 1), down, z[:, 0], pdl=pdl, **config)
    if parts > 1 and (add or ("second" if parts * n <= ADDED else "between")) == "between":
        z = add_parts(z, x.dtype, pdl)
    return _last(z, up, bias, x, pdl, second)


def monarch(
    x: Tensor,
    U: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    first: Config | None = None,
    second: Config | None = None,
) -> Tensor:
    """Two launches; the first stores in the order that the second reads. Arguments as `lowrank`."""
    n, pdl = len(x), supports_pdl(x.device)
    blocks, _, middle = V.shape
    z = room(blocks, middle, n, x.dtype, x)
    config = {**(first or {}), "SPLIT": 1, "part": middle // blocks}
    product(_tokens(x, blocks), _columns(V.mT), z.flatten(1, 2), pdl=pdl, **config)
    return _last(z, _columns(U), bias, x, pdl, second)


def blast(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    first: Config | None = None,
    second: Config | None = None,
    ranks: int = 4,
) -> Tensor:
    """Three launches: V, the mix of `ranks` at a time, U. Arguments as `lowrank`, S [b, b, r]."""
    n, pdl = len(x), supports_pdl(x.device)
    blocks, _, rank = V.shape
    z = room(blocks, rank, n, x.dtype, x)
    config = {**(first or {}), "SPLIT": 1}
    product(_tokens(x, blocks), _columns(V.mT), z.flatten(1, 2), pdl=pdl, **config)
    mix(z, S, pdl, ranks)
    return _last(z, _columns(U), bias, x, pdl, second)


def _last(
    z: Tensor, w: Tensor, bias: Tensor | None, x: Tensor, pdl: bool, config: Config | None
) -> Tensor:
    """y [n, B·R] of the last product, w [B, R, K] of z [P, B, K, n]."""
    y = torch.empty(len(x), w.shape[0] * w.shape[1], dtype=x.dtype, device=x.device)
    usual = {"BK": PARTED} if len(z) > 1 else {}
    product(z, w, y.t().unsqueeze(0), bias, pdl=pdl, **{**usual, **(config or {}), "SPLIT": 1})
    return y


def _tokens(x: Tensor, blocks: int) -> Tensor:
    """x [n, B·K] as [1, B, K, n]."""
    return x.unflatten(1, (blocks, -1)).permute(1, 2, 0).unsqueeze(0)


def _columns(w: Tensor) -> Tensor:
    """w [B, R, K] with columns of stride 1."""
    return w if w.stride(2) == 1 else w.contiguous()
