"""Decides whether an attention projection is factorized whole, in groups of heads, or head by head.

Thresholds are those of FlashSVD ("FlashSVD: memory-efficient inference with streaming for low-rank
models", theorems 8.13, 8.22 and 8.25). A projection has i inputs and o outputs, and its heads are next
to each other on one of these sides. D is the other side and s = (heads' side)/G the width of one of G
groups, whose factors are [s, r] and [D, r]. For the paper's square projection of H heads, D = H·s:

* parameters fall iff r(D + s) < D·s per group: r < D/2 as a whole (G = 1), r < D/(H + 1) per head;
* activation memory for M tokens falls iff G·r·(M + s) < M·G·s, the ranks and the streamed factor
  against the dense heads: r < M·D/(M + D) as a whole, r < M·D/(H·M + D) per head.

In grouped-query attention the k and v projections have H_kv heads.
"""

from dataclasses import dataclass
from math import inf, log

from blr.compressor.structures.patterns import predicted_log_error

TOKENS = 4096  # batch × length for which activation memory is judged: one long prefill


@dataclass(frozen=True)
class Grouping:
    """A number of groups, and why it was chosen."""

    groups: int
    reason: str


def parameter_threshold(width: int, other: int, groups: int) -> float:
    """The rank of each of G `groups` below which the factors have fewer parameters than the dense
    weight, which has `width` features on the heads' side and `other` on the other (theorems 8.13 and
    8.22)."""
    part = width / groups
    return part * other / (part + other)


def memory_threshold(width: int, groups: int, tokens: int = TOKENS) -> float:
    """The rank of each of G `groups` below which activations of `tokens` take less memory than dense
    heads (theorems 8.13, 8.22 and 8.25)."""
    return tokens * width / (groups * tokens + width)


def saves(width: int, other: int, groups: int, rank: float, tokens: int = TOKENS) -> bool:
    """Whether G groups of this rank have fewer parameters and take less activation memory than dense."""
    return rank < min(parameter_threshold(width, other, groups), memory_threshold(width, groups, tokens))


def candidates(heads: int) -> list[int]:
    """The numbers of groups that hold whole heads: the divisors of `heads`, falling."""
    return [g for g in range(heads, 0, -1) if heads % g == 0]


def groups_for_rank(width: int, other: int, heads: int, rank: int) -> Grouping:
    """The most groups for which a given rank of each still saves parameters and memory."""
    for groups in candidates(heads):
        if saves(width, other, groups, rank):
            limit = min(parameter_threshold(width, other, groups), memory_threshold(width, groups))
            return Grouping(groups, f"{_name(groups, heads)}: rank {rank} is under {limit:.4g}")
    return Grouping(1, f"whole: rank {rank} saves nothing in any grouping")


def groups_for_budget(width: int, other: int, heads: int, cf: float) -> Grouping:
    """The grouping of least predicted error (`patterns.predicted_log_error`) that meets a compression
    factor and saves memory."""
    options = {}
    for groups in candidates(heads):
        rank = parameter_threshold(width, other, groups) / cf
        if rank >= 1 and saves(width, other, groups, rank):
            options[groups] = predicted_log_error(other, width, groups, 1, int(rank))
    if not options:
        return Grouping(1, "whole: no grouping saves memory at this budget")
    best = min(options, key=lambda g: (options[g] if options[g] > -inf else -inf, g))
    ranks = parameter_threshold(width, other, best) / cf
    reason = f"{_name(best, heads)}: least predicted error of {len(options)} groupings, rank {ranks:.0f}"
    return Grouping(best, reason)


def nearest_grouping(wanted: int, heads: int, width: int) -> int:
    """The number of groups nearest `wanted` that keeps heads whole and divides `width`."""
    common = [g for g in candidates(heads) if width % g == 0]
    return min(common, key=lambda g: (abs(log(g / wanted)), g))


def _name(groups: int, heads: int) -> str:
    if groups == 1:
        return "whole"
    return "per head" if groups == heads else f"{groups} groups of {heads // groups} heads"
