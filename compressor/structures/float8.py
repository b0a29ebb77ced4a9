"""Rounds to float8 with error compensation, at scales that are chosen by what errors cost.

A scale only says where the numbers of a row fall between powers of two: the best of some within a factor
of two is taken. Then columns are rounded in turn, costly ones first, errors made good by those that
follow (GPTQ, arXiv 2210.17323; scales are known before, so that the order is free), and every number
again to the nearest of what is best beside all others (coordinate descent, QuantEase, arXiv 2309.01885).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.structures.gptq import compensation, damped
from blr.kernels.fp8.reference import E4M3, LARGEST, nearest_fp8, of_columns, scales_fp8

COLUMNS = 128  # whose errors reach the others together
# What the largest number of a row may become: all that float8 has within a factor of two, so that
# numbers which lie on its grid already find the scale that they have.
TOPS = (448, 416, 384, 352, 320, 288, 256, 240)
SWEEPS = 2  # of descent
# Of H's own diagonal, where H is of inputs: what few tokens show of two together holds less for others
EASE = 0.3


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
    """Round `weight`: numbers [..., R, K] and scales [..., R, groups] as of `reference.quantize_fp8`.

    Args:
        weight: [..., R, K], float32 or float64. group: columns that share a scale, per row; `ROW` for
            all of them.
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
    """The values nearest to `weight` that float8 has at the scales `by`."""
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
