"""Rounds matrices column by column; the columns that follow compensate each column's error.

For dense weights columns are inputs. For a factor U of W = U Zᵀ they are ranks and ZᵀHZ is the Gram
matrix: what rounding one term loses, terms that are like it take over.

Source: GPTQ (arXiv 2210.17323), with the inverse Cholesky factor of H in blocks of columns; scales
are chosen group by group for the weights as they stand then, each column weighted by what an error
there costs. Columns are taken as they are stored: taking the costly ones first would scatter groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.structures.linalg import cholesky, inverse_spd
from blr.kernels.common.available import kernel_device
from blr.kernels.decode.quantized.formats import SUPERBLOCK
from blr.kernels.decode.quantized.reference import (
    levels_of,
    multiples_of,
    scales_of,
    shared_unit,
    values_of,
)

DAMP = 0.01  # of the mean diagonal, added to H

Rounding = Callable[..., tuple[Tensor, ...]]


class Rounded(NamedTuple):
    """A rounded matrix: `levels` [..., o, i], int8, and `scale` [..., o, groups] stand for `value` [...,
    o, i]. `latent` [..., o, i] are the compensated weights before rounding, from which training goes
    on."""

    levels: Tensor
    scale: Tensor
    value: Tensor
    latent: Tensor


def compensation(gram: Tensor) -> Tensor:
    """Upper Cholesky factor R [..., i, i] of H⁻¹ = Rᵀ R, for H [..., i, i] in float64: row j says how
    later columns compensate an error in column j."""
    return cholesky(inverse_spd(damped(gram))).mT.contiguous()


def damped(gram: Tensor) -> Tensor:
    """H [..., i, i] over its mean diagonal, with a ridge: all errors cost at least a little."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    return gram / scale[..., None, None] + DAMP * identity


def gptq(
    weight: Tensor,
    root: Tensor,
    bits: int,
    group: int,
    scale_dtype: torch.dtype,
    curved: bool = True,
    superblocks: bool = False,
) -> Rounded:
    """Round `weight` [..., o, i], float32 or float64, to `bits`, column by column. root: of
    `compensation`, in the same dtype. group: columns of a row that share a scale; the last group may be
    shorter. scale_dtype: what scales are stored in. curved: which grid 3 bits take. superblocks: whether
    scales of 8 groups are multiples of one unit, chosen before the first of them is rounded.
    """
    left, scales = weight.clone(), []
    levels = torch.empty_like(weight, dtype=torch.int8)
    value, latent = torch.empty_like(left), torch.empty_like(left)
    unit = None
    for start in range(0, weight.shape[-1], group):
        columns = slice(start, min(start + group, weight.shape[-1]))
        part, own = left[..., columns], root[..., columns, columns].contiguous()
        costs = own.diagonal(dim1=-2, dim2=-1).pow(-2)[..., None, :]
        if superblocks and start % (SUPERBLOCK * group) == 0:
            wide = left[..., start : start + SUPERBLOCK * group].unflatten(-1, (-1, group))
            unit = shared_unit(scales_of(wide, bits, scale_dtype, curved=curved).squeeze(-1), bits)
        scale = scales_of(part, bits, scale_dtype, costs, curved)
        scale = scale if unit is None else multiples_of(scale, unit, bits)
        found, latent[..., columns], missed = _rounding(part)(part, own, scale, bits, curved)
        levels[..., columns], value[..., columns] = found, values_of(found, scale, bits, curved)
        left[..., columns.stop :] -= missed @ root[..., columns, columns.stop :]
        scales.append(scale)
    return Rounded(levels, torch.cat(scales, -1), value, latent)


def _rounding(part: Tensor) -> Rounding:
    """The function `round_group`, or a kernel that does the same where one runs."""
    if part.dtype != torch.float32 or not kernel_device(part):
        return round_group
    from blr.kernels.decode.quantized import compensate

    return compensate.round_group


def round_group(
    part: Tensor, root: Tensor, scale: Tensor, bits: int, curved: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Round the columns of `part` [..., o, g] in turn. Returns levels, the compensated weights that were
    rounded, and errors divided by the diagonal of `root` [..., g, g]."""
    left, missed = part.clone(), torch.empty_like(part)
    levels = torch.empty_like(part, dtype=torch.int8)
    for j in range(part.shape[-1]):
        at, behind = slice(j, j + 1), slice(j + 1, None)
        column = left[..., at]
        levels[..., at] = found = levels_of(column, scale, bits, curved)
        error = (column - values_of(found, scale, bits, curved)) / root[..., at, at]
        missed[..., at] = error
        left[..., behind] -= error * root[..., at, behind]
    return levels, left, missed
