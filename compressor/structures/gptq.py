"""Rounds matrices column by column; the columns that follow compensate each column's error.

For dense weights columns are inputs. For a factor U of W = U Zᵀ they are ranks and ZᵀHZ is the Gram
matrix: what rounding one term loses, terms that are like it take over (GPTQ, arXiv 2210.17323).
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.structures.latent import RoundedGrid
from blr.compressor.structures.linalg import add_ridge, cholesky, inverse_spd, solve_spd
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.spec import Spec
from blr.kernels.common.available import kernel_device
from blr.kernels.decode.quantized.formats import SUPERBLOCK
from blr.kernels.decode.quantized.reference import (
    levels_of,
    multiples_of,
    scales_of,
    shared_unit,
    values_of,
)
from blr.kernels.fp8.reference import E4M3, LARGEST, nearest_fp8, of_columns, scales_fp8

DAMP = 0.01  # of the mean diagonal, added to H
COLUMNS = 128  # whose errors reach the others together
# What the largest number of a row may become: all that float8 has within a factor of two, so that
# numbers which lie on its grid already find the scale that they have.
TOPS = (448, 416, 384, 352, 320, 288, 256, 240)
SWEEPS = 2  # of descent
# Of H's own diagonal, where H is of inputs: what few tokens show of two together holds less for others
EASE = 0.3
NOTHING = 1e-5  # of the mean diagonal: what float32 leaves of a difference that is none


def compensation(gram: Tensor) -> Tensor:
    """Upper Cholesky factor R [..., i, i] of H⁻¹ = Rᵀ R, for H [..., i, i] in float64: row j says how
    later columns compensate an error in column j."""
    return cholesky(inverse_spd(damped(gram))).mT.contiguous()


def damped(gram: Tensor) -> Tensor:
    """H [..., i, i] over its mean diagonal, with a ridge: all errors cost at least a little."""
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    return add_ridge(gram / scale[..., None, None], DAMP)


def gptq(weight: Tensor, root: Tensor, grid: RoundedGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Round `weight` [..., o, i], float32 or float64, to `grid`, column by column, as they are stored:
    taking the costly ones first would scatter groups. Scales are chosen group by group for the weights
    as they stand then, each column weighted by what an error there costs; the unit of a superblock
    before the first of its groups is rounded. The last group may be shorter. root: of `compensation`, in
    the dtype of `weight`. Returns levels [..., o, i], int8, scales [..., o, groups], and the compensated
    weights [..., o, i] before rounding, from which training goes on."""
    bits, group, dtype, curved = grid.bits, grid.group, grid.scale_dtype, grid.curved
    round_part: Callable[..., tuple[Tensor, Tensor, Tensor]] = round_group
    if weight.dtype == torch.float32 and kernel_device(weight):
        from blr.kernels.decode.quantized import compensate

        round_part = compensate.round_group
    left, scales = weight.clone(), []
    levels, latent = torch.empty_like(weight, dtype=torch.int8), torch.empty_like(left)
    unit = None
    for start in range(0, weight.shape[-1], group):
        columns = slice(start, min(start + group, weight.shape[-1]))
        part, own = left[..., columns], root[..., columns, columns].contiguous()
        costs = own.diagonal(dim1=-2, dim2=-1).pow(-2)[..., None, :]
        if grid.superblocks and start % (SUPERBLOCK * group) == 0:
            wide = left[..., start : start + SUPERBLOCK * group].unflatten(-1, (-1, group))
            unit = shared_unit(scales_of(wide, bits, dtype, curved=curved).squeeze(-1), bits)
        scale = scales_of(part, bits, dtype, costs, curved)
        scale = scale if unit is None else multiples_of(scale, unit, bits)
        levels[..., columns], latent[..., columns], missed = round_part(part, own, scale, bits, curved)
        left[..., columns.stop :] -= missed @ root[..., columns, columns.stop :]
        scales.append(scale)
    return levels, torch.cat(scales, -1), latent


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


class Costs(NamedTuple):
    """The cost of errors in columns. order: [..., K], costly columns first. In that order, gram: H [...,
    K, K] with its ridge; root: its `compensation` [..., K, K]."""

    order: Tensor
    gram: Tensor
    root: Tensor


def costs_of(gram: Tensor, ease: float = 0.0) -> Costs:
    """The costs by H [..., K, K], float64, with `ease` times its own diagonal added."""
    gram = gram + ease * torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    order = gram.diagonal(dim1=-2, dim2=-1).argsort(descending=True, stable=True)
    at = order[..., None, :].expand_as(gram)
    ordered = gram.gather(-2, at.mT).gather(-1, at)
    return Costs(order, damped(ordered), compensation(ordered))


def round_fp8(
    weight: Tensor, costs: Costs, group: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Round `weight` [..., R, K], float32 or float64: numbers [..., R, K] and scales [..., R, groups] as
    of `reference.quantize_fp8`. group: columns that share a scale, per row; `ROW` for all of them.

    A scale only says where the numbers of a row fall between powers of two: the best of some within a
    factor of two is taken. Then columns are rounded in turn, costly ones first: scales are known before,
    so that the order is free. At the end every number is rounded again to the nearest of what is best
    beside all others (coordinate descent, QuantEase, arXiv 2309.01885).
    """
    at = costs.order[..., None, :].expand_as(weight)
    ordered, gram = weight.gather(-1, at), costs.gram.to(weight)

    def by_column(scale: Tensor) -> Tensor:
        return of_columns(scale.to(weight), group, weight.shape[-1]).expand_as(weight).gather(-1, at)

    least = scales_fp8(weight, group)
    tried = [(least * (LARGEST / top)).to(scale_dtype) for top in TOPS]
    scale = _best(ordered, gram, tried, by_column)
    by = by_column(scale)
    value = _in_turn(ordered, by, costs.root.to(weight))
    for _ in range(SWEEPS):
        value = _again(ordered, value, by, gram)
    found = nearest_fp8(value, by).view(torch.uint8)  # float8 itself is not scattered
    return torch.empty_like(found).scatter_(-1, at, found).view(E4M3), scale


def _best(
    weight: Tensor, gram: Tensor, scales: list[Tensor], by_column: Callable[[Tensor], Tensor]
) -> Tensor:
    """For every row the `scales` [..., R, groups] at which its nearest numbers lose least."""
    best, least = scales[0], torch.full_like(weight[..., :1], torch.inf)
    for scale in scales:
        missed = weight - _nearest(weight, by_column(scale))
        lost = ((missed @ gram) * missed).sum(-1, keepdim=True)
        best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def _nearest(weight: Tensor, by: Tensor) -> Tensor:
    return nearest_fp8(weight, by).to(weight) * by


def _in_turn(weight: Tensor, by: Tensor, root: Tensor) -> Tensor:
    """Rounded values [..., R, K], column by column; later columns compensate each error."""
    left, value = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[-1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        part, own = left[..., columns], root[..., columns, columns]
        missed = torch.empty_like(part)
        for j in range(part.shape[-1]):
            one, at = slice(j, j + 1), slice(start + j, start + j + 1)
            value[..., at] = now = _nearest(part[..., one], by[..., at])
            missed[..., one] = error = (part[..., one] - now) / own[..., one, one]
            part[..., j + 1 :] -= error * own[..., one, j + 1 :]
        left[..., columns.stop :] -= missed @ root[..., columns, columns.stop :]
    return value


def _again(weight: Tensor, value: Tensor, by: Tensor, gram: Tensor) -> Tensor:
    """One sweep of coordinate descent: each value [..., R, K] becomes the one nearest to the best beside
    the others."""
    moved, pull = value.clone(), (weight - value) @ gram
    for start in range(0, weight.shape[-1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        part, own = pull[..., columns].clone(), gram[..., columns, columns]
        for j in range(part.shape[-1]):
            one, at = slice(j, j + 1), slice(start + j, start + j + 1)
            wanted = value[..., at] + part[..., one] / own[..., one, one]
            moved[..., at] = now = _nearest(wanted, by[..., at])
            part -= (now - value[..., at]) * own[..., one, :]
        pull += (value - moved)[..., columns] @ gram[..., columns, :]
    return moved


def seen_by_v(spec: Spec, factors: Mapping[str, Tensor], gram: Tensor | None) -> Tensor | None:
    """What rounding errors in V cost where U is fitted afterwards: the part that no U makes good.

    Of ``W_k = U_k Z_kᵀ`` an error δ in Z_k is made good as far as it lies in the span of Z_k, in the
    metric of the inputs. To first order the rest costs ``U_k δᵀ (H − H Z_k (Z_kᵀ H Z_k)⁻¹ Z_kᵀ H) δ
    U_kᵀ``.

    Args:
        factors: canonical. gram: [i, i] of the layer's inputs, None for white ones.

    Returns the metric of the columns of a packed V: for low rank V [r, i] it is [i, i]; for Monarch
    [l, k·r', p] it is [l, k, p, p]; for BLAST [l, r, p] it is [l, p, p], a mean over block rows by their
    share. None where a structure has no such V.
    """
    if spec.structure not in ("svd", "monarch", "blast") or getattr(spec, "groups", 1) > 1:
        return None
    right = STRUCTURES[spec.structure].factorizer().right_factor(dict(factors), spec)  # [..., i, K]
    whole = torch.eye(spec.in_features).to(right) if gram is None else gram.to(right)
    if spec.structure == "svd":
        return _left(whole, right, 1)[0]
    if spec.structure == "monarch":
        return torch.stack([_left(whole, Z, len(right)) for Z in right], 1)
    used = factors["U"].square().sum(1)[:, None] * factors["S"].square()  # [k, l, r]
    shares = used.mean(-1)[..., None, None]
    parts = (s * _left(whole, Z, len(right)) for s, Z in zip(shares, right, strict=True))
    return reduce(torch.add, parts)


def _left(gram: Tensor, Z: Tensor, blocks: int) -> Tensor:
    """The diagonal blocks [b, p, p] of ``H − H Z (Zᵀ H Z)⁻¹ Zᵀ H``. Where next to nothing but rounding
    is left, as where Z has the rank of its inputs, those of H."""
    weighted = gram @ Z
    solved = solve_spd(Z.mT @ weighted, weighted)
    own = gram.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))
    parts = zip(weighted.chunk(blocks), solved.chunk(blocks), strict=True)
    found = []
    for n, (left, right) in enumerate(parts):
        whole, rest = own[n, :, n], own[n, :, n] - right @ left.mT
        some = rest.diagonal().mean() > NOTHING * whole.diagonal().mean()
        found.append(torch.where(some, (rest + rest.mT) / 2, whole))
    return torch.stack(found)
