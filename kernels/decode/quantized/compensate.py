"""Rounds the columns of a group in turn, each one's error made good by those that follow, in registers.

A program has `BR` rows of a group: one launch a group, where torch needs twenty a column.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr.kernels.decode.quantized.formats import grid_of

ROWS, WARPS = 4, 4  # of a program


@triton.jit
def point_of(x, CURVED: tl.constexpr):
    """What steps `x` from the middle of the grid stand for where the scale is 1."""
    return x * (1 + CURVED * x * x)


@triton.jit
def nearest_level(unit, BITS: tl.constexpr, OFF: tl.constexpr, CURVED: tl.constexpr):
    """The level, as a number, whose point is nearest to `unit`."""
    top: tl.constexpr = 2 ** (BITS - 1)
    if CURVED == 0:
        least: tl.constexpr = -top + (BITS == 8)
        return tl.minimum(tl.maximum(tl.floor(unit - OFF + 0.5), least), top - 1)
    level = tl.zeros_like(unit) - top
    for n in tl.static_range(2 * top - 1):
        between = (point_of(n - top + OFF, CURVED) + point_of(n + 1 - top + OFF, CURVED)) / 2
        level += tl.where(unit > between, 1.0, 0.0)
    return level


@triton.jit
def round_columns(
    part, root, scale, levels, latent, missed, rows, columns, part_row, part_matrix,
    BITS: tl.constexpr, OFF: tl.constexpr, CURVED: tl.constexpr, BR: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """part [rows, columns] of a row stride, root [columns, columns] and scale [rows] in float32; levels
    int8, latent and missed [rows, columns] are written; the same of each matrix of a batch."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    matrix = tl.program_id(1).to(tl.int64)
    part += matrix * part_matrix
    root += matrix * columns * columns
    column = tl.arange(0, BG)
    inside, there = column < columns, row < rows
    ok = there[:, None] & inside[None, :]
    tile = tl.load(part + row[:, None] * part_row + column[None, :], mask=ok, other=0.0)
    step = tl.load(scale + matrix * rows + row, mask=there, other=0.0)
    inverse = tl.where(step == 0, 0.0, 1 / tl.where(step == 0, 1.0, step))
    found, errors = tl.zeros_like(tile), tl.zeros_like(tile)
    for j in range(0, columns):
        here = (column == j)[None, :]
        value = tl.sum(tl.where(here, tile, 0.0), 1)
        level = nearest_level(value * inverse, BITS, OFF, CURVED)
        error = value - point_of(level + OFF, CURVED) * step
        error /= tl.load(root + j * columns + j)
        behind = tl.load(root + j * columns + column, mask=inside & (column > j), other=0.0)
        tile -= error[:, None] * behind[None, :]
        found = tl.where(here, level[:, None], found)
        errors = tl.where(here, error[:, None], errors)
    out = (matrix * rows + row)[:, None] * columns + column[None, :]
    tl.store(levels + out, found.to(tl.int8), mask=ok)
    tl.store(latent + out, tile, mask=ok)
    tl.store(missed + out, errors, mask=ok)


def round_group(
    part: Tensor, root: Tensor, scale: Tensor, bits: int, curved: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels of the columns of `part` [..., o, g] in turn, what was rounded, and the errors over the
    diagonal of `root` [..., g, g]; `scale` [..., o, 1]. All float32."""
    (*batch, rows, columns), grid = part.shape, grid_of(bits, curved)
    levels = torch.empty(*batch, rows, columns, dtype=torch.int8, device=part.device)
    latent, missed = (torch.empty_like(levels, dtype=part.dtype) for _ in range(2))
    part = part.flatten(0, -3) if len(batch) > 1 else part
    part = part if part.stride(-1) == 1 else part.contiguous()
    with torch.cuda.device_of(part):
        round_columns[(triton.cdiv(rows, ROWS), prod(batch))](
            *(part, root.contiguous(), scale.to(part.dtype).contiguous(), levels, latent, missed),
            *(rows, columns, part.stride(-2), part.stride(0) if batch else 0),
            **{"BITS": bits, "OFF": grid.shift, "CURVED": grid.curve, "BR": ROWS},
            BG=max(triton.next_power_of_2(columns), 16),
            num_warps=WARPS,
        )
    return levels, latent, missed
