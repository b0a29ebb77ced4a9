"""What one launch of the skinny products is made of, and the order of their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr.kernels.quantized.formats import PLANES


class SkinnyStage(NamedTuple):
    """What kernels take of a stage: pointers, strides and sizes, in elements of what they point to.

    w: plain numbers, or packed weights in units of 16 bits. K: columns, or groups of packed weights.
    u [rows, ranks], z [n, ranks]: what corrects the result. gain, ready, squares: of `Emission`, for the
    next stage; norms [tiles, slots], of norm_width columns: those squares, of the stage before. The rest
    as of `blr.kernels.gemv.segments.Stage`.
    """

    x: Any
    x_token: int
    x_block: int
    w: Any
    w_block: int
    w_row: int
    scale: Any
    scale_block: int
    scale_row: int
    bias: Any
    y: Any
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int
    u: Any
    u_row: int
    z: Any
    z_token: int
    ranks: int
    gain: Any
    ready: Any
    ready_token: int
    squares: Any
    norms: Any
    norm_tiles: int
    norm_width: int


class SkinnyTile(NamedTuple):
    """What the code of a stage is specialized by: bits of a weight and columns of a GROUP; rows BR of a
    program's tile; columns, or groups of packed weights, of a STEP; programs that SPLIT a row; STAGES of
    steps that are on their way; whether there is a BIAS; whether every step of a row is FULL; whether
    fields are unpacked by instructions of the GPU (ASM); the power of two RANKS of a correction or 0;
    lines of a row that are asked for AHEAD of its inputs; LOW and LOW_GROUP of the packed weights in
    whose order results are stored, or 16; whether to EMIT what the next stage reads; the power of two of
    tiles whose NORMS of squares wait to be applied, or 0."""

    BITS: int
    GROUP: int
    BR: int
    STEP: int
    SPLIT: int
    STAGES: int
    BIAS: bool = False
    FULL: bool = False
    ASM: bool = True
    RANKS: int = 0
    AHEAD: int = 0
    LOW: int = 16
    LOW_GROUP: int = 0
    EMIT: bool = False
    NORMS: int = 0


@dataclass(frozen=True)
class Emission:
    """What a stage that adds to the residual stream x leaves for the stage that reads its norm.

    ready: [n, K'], ``x · gain`` in half precision and the order of `order` (None: as it is), to be
    divided by the root mean square of x. squares: [tiles, slots] in float32, sums of squares of x over
    the rows of a tile. width, eps: of the norm.
    """

    gain: Tensor
    eps: float
    ready: Tensor
    squares: Tensor
    width: int
    order: tuple[int, int] | None


def field_order(bits: int, group: int) -> Tensor:
    """[group] int64: the column of each place of a group, in the order in which fields meet inputs.

    Half h of word j of the lowest plane (i = 2 j + h of H halves) has fields s = 0 …: place s·H + i.
    """
    low = PLANES[bits][0]
    halves, words = group * low // 16, group * low // 32
    place = torch.arange(group)
    field, half = place // halves, place % halves
    return ((half % 2) * (16 // low) + field) * words + half // 2
