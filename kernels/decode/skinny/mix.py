"""The mix of BLAST behind skinny products of its first factors: sums over blocks, rank by rank."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.quantized.formats import PLANES
from blr.kernels.decode.skinny.triton import place_of

PLAIN = 16  # the bits of plain weights
MOST = 64  # blocks
HELD = 4096  # couplings that a program holds
FEW = 8  # tokens of which every program has one; of more it has FOUR
FOUR = 4


class Mix(NamedTuple):
    """One layer's: ``y[n, k·R + r] = Σ_l s[k, l, r] z[n, l·R + r]``; strides in elements."""

    z: Tensor
    z_token: int
    s: object
    s_out: int
    s_in: int
    s_rank: int
    y: Tensor
    y_token: int
    ranks: int
    blocks: int


@triton.jit
def mix_ranks(
    program, m, first, tokens, B: tl.constexpr, BR: tl.constexpr, EACH: tl.constexpr,
    LOW: tl.constexpr, LOW_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BR ranks of EACH tokens from `first` on, stored in the order of packed weights of LOW bits."""
    rank = program * BR + tl.arange(0, BR)
    block = tl.arange(0, B)
    ok = (block < m.blocks)[:, None] & (rank < m.ranks)[None, :]
    at = block[:, None, None] * m.s_out + block[None, :, None] * m.s_in
    there = ok[:, None, :] & (block < m.blocks)[None, :, None]
    s = tl.load(m.s + at + rank[None, None, :] * m.s_rank, mask=there, other=0.0).to(tl.float32)
    column = block[:, None] * m.ranks + rank[None, :]
    place = place_of(column, LOW, LOW_GROUP)
    if PDL:
        gdc_wait()
    for each in tl.static_range(EACH):
        token = first + each
        here = ok & (rank < tl.where(token < tokens, m.ranks, 0))[None, :]
        z = tl.load(m.z + token * m.z_token + column, mask=here, other=0.0).to(tl.float32)
        w = tl.sum(s * z[None, :, :], 1)
        tl.store(m.y + token * m.y_token + place, w.to(m.y.dtype.element_ty), mask=here)


@triton.jit
def mix_kernel(
    m0, m1, m2, end0, end1, tokens,
    COUNT: tl.constexpr, B: tl.constexpr, BR: tl.constexpr, EACH: tl.constexpr,
    LOW: tl.constexpr, LOW_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT layers: programs up to end0 do the first, up to end1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    first = tl.program_id(1) * EACH
    if program < end0:
        mix_ranks(program, m0, first, tokens, B, BR, EACH, LOW, LOW_GROUP, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= end0) & (program < end1):
            mix_ranks(program - end0, m1, first, tokens, B, BR, EACH, LOW, LOW_GROUP, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= end1:
            mix_ranks(program - end1, m2, first, tokens, B, BR, EACH, LOW, LOW_GROUP, PDL)


def mix(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    order: tuple[int, int] | None = None,
    pdl: bool = False,
) -> None:
    """The mixes of one to three layers in one launch.

    Args:
        layers: (z [n, B·R] with columns of stride 1, couplings [B, B, R], y [n, B·R]) of each, of the
            same number of blocks, at most `MOST`. order: as of `launch.grouped`.
    """
    blocks, tokens = layers[0][1].shape[0], len(layers[0][0])
    wide = power_of_two(blocks)
    ranks, each = max(HELD // wide**2, 1), 1 if tokens <= FEW else FOUR
    given = [_mix(*layer) for layer in layers]
    ends = [*accumulate(-(-m.ranks // ranks) for m in given)]
    low, group = (PLAIN, 0) if order is None else (PLANES[order[0]][0], order[1])
    mix_kernel[(ends[-1], -(-tokens // each))](
        *(*given, *given[:1] * 2)[:3],
        *(ends[0], ends[min(1, len(ends) - 1)], tokens),
        COUNT=len(given),
        B=wide,
        BR=ranks,
        EACH=each,
        LOW=low,
        LOW_GROUP=group,
        num_warps=4,
        **launch_options(pdl),
    )


def _mix(z: Tensor, s: Tensor, y: Tensor) -> Mix:
    blocks, _, ranks = s.shape
    couplings = (s, s.stride(0), s.stride(1), s.stride(2))
    return Mix(z, z.stride(0), *couplings, y, y.stride(0), ranks, blocks)


def fits(mixes: Sequence[object]) -> bool:
    """Whether the couplings of layers are plain numbers that one launch mixes."""
    plain = [s.shape[0] for s in mixes if isinstance(s, Tensor) and s.is_floating_point()]
    return len(plain) == len(mixes) <= 3 and len(set(plain)) == 1 and plain[0] <= MOST
