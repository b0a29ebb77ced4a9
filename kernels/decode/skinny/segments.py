"""What one launch of the skinny products is made of."""

from typing import NamedTuple

from torch import Tensor


class SkinnyStage(NamedTuple):
    """What kernels take of a stage: pointers, strides and sizes, in elements of what they point to.

    w: plain numbers, or packed weights in units of 16 bits. K: columns, or groups of packed weights.
    u [rows, ranks], z [n, ranks]: what corrects the result. The rest as of
    `blr.kernels.decode.gemv.segments.Stage`.
    """

    x: Tensor
    x_token: int
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    scale: object
    scale_block: int
    scale_row: int
    bias: Tensor
    y: Tensor
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int
    u: object
    u_row: int
    z: Tensor
    z_token: int
    ranks: int


class SkinnyTile(NamedTuple):
    """What the code of a stage is specialized by: bits of a weight and columns of a GROUP; rows BR of a
    program's tile; columns, or groups of packed weights, of a STEP; programs that SPLIT a row; STAGES of
    steps that are on their way; whether there is a BIAS; whether every step of a row is FULL; whether
    fields are unpacked by instructions of the GPU (ASM); the power of two RANKS of a correction or 0;
    lines of a row that are asked for AHEAD of its inputs; LOW and LOW_GROUP of the packed weights in
    whose order results are stored, or 16; whether the grid of the weights is CURVED."""

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
    CURVED: bool = False
