"""Error-compensated rounding: each column's error is made good by the columns that follow.

Source: GPTQ (arXiv 2210.17323), with the inverse Cholesky factor of H in blocks of columns; scales
are chosen group by group for the weights as they stand then, each column weighted by what an error
there costs. Columns are taken by falling diagonal of H where that is asked for and groups are of
one column each otherwise in stored order, so that groups stay contiguous in the file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.rounding.grid import best_scale, nearest
from blr.compressor.structures.linalg import cholesky, inverse_spd

DAMP = 0.01  # of the mean diagonal, added to H


class Rounded(NamedTuple):
    """`value` [o, i] on the grid, `scale` [o, groups], and `latent` [o, i]: the compensated weights
    that were rounded, from which training goes on."""

    value: Tensor
    scale: Tensor
    latent: Tensor


def compensation(gram: Tensor) -> Tensor:
    """Upper Cholesky factor R [i, i] of H⁻¹ = Rᵀ R: row j says what columns behind j take over of an
    error in column j.

    Args:
        gram: H [i, i], float64.
    """
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    scale = gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    return cholesky(inverse_spd(gram / scale + DAMP * identity)).mT.contiguous()


def gptq(
    weight: Tensor, root: Tensor, bits: int, group: int, scale_dtype: torch.dtype | None = None
) -> Rounded:
    """Round `weight` [o, i] to `bits`, column by column.

    Args:
        weight: float32 or float64. root: of `compensation`, in the same dtype.
        group: columns that share a scale, per row; the last group may be shorter.
        scale_dtype: what scales are stored in.
    """
    left = weight.clone()
    value, latent, scales = torch.empty_like(left), torch.empty_like(left), []
    for start in range(0, weight.shape[1], group):
        columns = slice(start, min(start + group, weight.shape[1]))
        part, own = left[:, columns], root[columns, columns].contiguous()
        scale = best_scale(part, bits, own.diagonal().pow(-2), scale_dtype)
        missed = _round_group(part, own, scale, bits, value[:, columns], latent[:, columns])
        left[:, columns.stop :] -= missed @ root[columns, columns.stop :]
        scales.append(scale)
    return Rounded(value, torch.cat(scales, -1), latent)


def _round_group(
    part: Tensor, root: Tensor, scale: Tensor, bits: int, value: Tensor, latent: Tensor
) -> Tensor:
    """Round the columns of `part` [o, g] in turn into `value`; the errors [o, g] over the diagonal."""
    left, missed = part.clone(), torch.empty_like(part)
    for j in range(part.shape[1]):
        column = left[:, j : j + 1]
        latent[:, j : j + 1] = column
        value[:, j : j + 1] = found = nearest(column, scale, bits) * scale
        missed[:, j : j + 1] = error = (column - found) / root[j, j]
        left[:, j + 1 :] -= error * root[j : j + 1, j + 1 :]
    return missed
