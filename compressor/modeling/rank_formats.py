"""What a cache holds ranks in: their dtype, int8, or int8 for the first and int4 for the others.

Ranks fall in what they are worth, so equal bits for all waste some: the first quarter in int8 and the
others in int4 lose a sixth or less of what int4 alone does (`scripts/log`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.structures.cached import KV_CACHES, leading

LARGEST = {"int8": 127, "int4": 7}

Parts = tuple[Tensor, ...]


class Format(NamedTuple):
    """Ranks [B, T, …, r] to what is held of them, [B, T, …] each, and back in a dtype."""

    pack: Callable[[Tensor], Parts]
    unpack: Callable[[Parts, torch.dtype], Tensor]


def _rounded(ranks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Whole numbers in int8, and the scale of every token's ranks. In float32: half precision has no
    number between 127 and 128, which int8 has not."""
    wide, most = ranks.float(), LARGEST[kind]
    scale = (wide.abs().amax(-1, keepdim=True) / most).to(ranks.dtype)
    scale = scale.clamp_min(torch.finfo(ranks.dtype).tiny)
    return (wide / scale.float()).round().clamp(-most, most).to(torch.int8), scale


def _scaled(parts: Parts, dtype: torch.dtype) -> Tensor:
    whole, scale = parts
    return whole.to(dtype) * scale


def _mixed(ranks: Tensor) -> Parts:
    """Whole numbers of the first ranks and their scale, then the others', two a byte, and theirs."""
    first, others = ranks.tensor_split([leading(ranks.shape[-1])], -1)
    if not others.shape[-1]:
        return _rounded(first, "int8")
    whole, scale = _rounded(others, "int4")
    low, high = (whole + 8).to(torch.uint8).unflatten(-1, (2, -1)).unbind(-2)
    return *_rounded(first, "int8"), low | high << 4, scale


def _unmixed(parts: Parts, dtype: torch.dtype) -> Tensor:
    first = _scaled(parts[:2], dtype)
    if len(parts) == 2:
        return first
    pairs, scale = parts[2:]
    whole = torch.cat((pairs & 15, pairs >> 4), -1).to(dtype) - 8
    return torch.cat((first, whole * scale), -1)


def _kept(ranks: Tensor) -> Parts:
    return (ranks,)


def _only(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts[0]


_FORMATS = (  # by names that pickle finds: a cache may be kept in a file
    Format(_kept, _only),
    Format(partial(_rounded, kind="int8"), _scaled),
    Format(_mixed, _unmixed),
)
FORMATS = dict(zip(KV_CACHES, _FORMATS, strict=True))
