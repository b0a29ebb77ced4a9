"""Kernels for several decoding stages in one launch: q|k|v, gate|up, and gate ⊙ up.

The stages of one launch may differ in everything but the number of tokens: each has its own code,
specialized by its own strides and blocks, and a program picks one by its number. The arithmetic is
that of `triton.py` beside this file; the reference is in segments.py.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import (
    TOKENS,
    launch_options,
    norm_kind,
    pair_tile,
    power_of_two,
    rows_of,
    run_grouped,
    stage,
    tile_shape,
    tokens_of,
)
from blr.kernels.decode.gemv.segments import Segment, Tile
from blr.kernels.decode.gemv.triton import activate, stage_rows, store_rows


@triton.jit
def mixed_segment(
    tile, s, gain, eps,
    L: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """BR ranks of up to L blocks and their mix: ``y[k, r] = Σ_l s[k, l, r] (w[l, r, :] · x_l)``."""
    rank = tile * BR + tl.arange(0, BR)
    block = tl.arange(0, L)
    lane = tl.arange(0, BK)
    rank_ok = rank < s.rows
    block_ok = block < s.blocks
    at = s.w + (block.to(tl.int64)[:, None] * s.w_block + rank.to(tl.int64)[None, :] * s.w_row)
    ok = block_ok[:, None] & rank_ok[None, :]
    there = (lane < s.K)[None, None, :]
    first = tl.load(
        at[:, :, None] + lane[None, None, :] * s.w_col, mask=ok[:, :, None] & there, other=0.0
    )
    at_mix = block[:, None, None] * s.mix_out + block[None, :, None] * s.mix_in
    at_mix += rank[None, None, :] * s.mix_rank
    mix = tl.load(s.mix + at_mix, mask=block_ok[:, None, None] & ok[None, :, :], other=0.0).to(
        tl.float32
    )
    if WAIT:
        gdc_wait()
    sums = tl.zeros([L, BR, BK], tl.float32)
    square = tl.zeros([L, BK], tl.float32)
    for start in range(0, s.K, BK):
        cols = start + lane
        after = cols + BK
        there = (after < s.K)[None, None, :]
        following = at[:, :, None] + after[None, None, :] * s.w_col
        following = tl.load(following, mask=ok[:, :, None] & there, other=0.0)
        at_x = block[:, None] * s.K + cols[None, :]
        x_ok = block_ok[:, None] & (cols < s.K)[None, :]
        v = tl.load(s.x + at_x, mask=x_ok, other=0.0).to(tl.float32)
        if NORM:
            square += v * v
            v *= tl.load(gain + at_x, mask=x_ok, other=0.0).to(tl.float32)
        sums += first.to(tl.float32) * v[:, None, :]
        first = following
    mixed = tl.sum(mix * tl.sum(sums, 2)[None, :, :], 1)
    if NORM:
        mixed *= tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / (s.K * s.blocks) + eps)
    to = s.y + block[:, None] * s.rows + rank[None, :]
    tl.store(to, mixed.to(s.y.dtype.element_ty), mask=ok)


@triton.jit
def run_segment(tile, s, gain, eps, T: tl.constexpr, ADD: tl.constexpr, WAIT: tl.constexpr):
    """One tile of a segment, stored, or added to what its result holds; of T.MIX blocks that it mixes,
    if there are any."""
    if T.MIX > 0:
        mixed_segment(tile, s, gain, eps, T.MIX, T.BR, T.BK, T.NORM, WAIT)
    else:
        found, out, ok = stage_rows(tile, s, gain, eps, T, WAIT)
        TOKENS: tl.constexpr = T.TOKENS
        for token in tl.static_range(TOKENS):
            store_rows(s.y + token * s.y_token, found[token], out, ok, ADD)


@triton.jit
def grouped_kernel(
    s0, s1, s2, programs0, programs1, gain, eps,
    COUNT: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, s0, gain, eps, T0, ADD, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, s1, gain, eps, T1, ADD, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, s2, gain, eps, T2, ADD, PDL)


@triton.jit
def dual_kernel(
    s0, s1, gain, eps, T0: tl.constexpr, T1: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    gate, out, ok = stage_rows(program, s0, gain, eps, T0, PDL)
    up, out, ok = stage_rows(program, s1, gain, eps, T1, False)
    TOKENS: tl.constexpr = T1.TOKENS
    for token in tl.static_range(TOKENS):
        store_rows(s1.y + token * s1.y_token, activate(gate[token], ACT) * up[token], out, ok, False)


def grouped(
    segments: Sequence[Segment],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    pdl: bool = False,
    config: Sequence[dict[str, int]] | None = None,
) -> None:
    """`segments.grouped` in one launch.

    Args:
        segments: one to three, with columns of stride 1; of more than `TOKENS` tokens, or several that
            are mixed, several launches.
        add: to what the results hold; of none that is mixed.
        config: BR, BK and num_warps of each segment in place of `tile_shape`'s; the launch has the
            most warps of any.
    """
    most = TOKENS if all(s.mix is None for s in segments) else 1
    if len(segments[0].x) > most:
        for some in tokens_of(segments, most):
            grouped(some, gain=gain, eps=eps, add=add, pdl=pdl, config=config)
        return
    chosen = [segment_shape(s, gain) for s in segments]
    shapes = [{**shape, **(config[i] if config else {})} for i, shape in enumerate(chosen)]
    warps = max(shape["num_warps"] for shape in shapes)
    shapes = [{**s, "BR": rows_of({**s, "num_warps": warps}, len(segments[0].x))} for s in shapes]
    run_grouped(
        grouped_kernel,
        [stage(s) for s in segments],
        [_tile(s, shape, gain) for s, shape in zip(segments, shapes, strict=True)],
        gain=gain,
        eps=eps,
        ADD=add,
        num_warps=warps,
        **launch_options(pdl),
    )


def dual(
    gate: Segment,
    up: Segment,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    **config: Any,
) -> None:
    """`segments.dual` in one launch; config: BR, BK0, BK1, num_warps in place of `tile_shape`'s."""
    if len(up.x) > TOKENS:
        for some in tokens_of((gate, up), TOKENS):
            dual(*some, activation=activation, gain=gain, eps=eps, pdl=pdl, **config)
        return
    shapes = _pair_shapes(gate, up, gain)
    warps = config.get("num_warps", max(shape["num_warps"] for shape in shapes))
    columns = [config.get(f"BK{i}", shape["BK"]) for i, shape in enumerate(shapes)]
    rows = config.get("BR", min(shape["BR"] for shape in shapes))
    rows = rows_of({"BR": rows, "BK": max(columns), "num_warps": warps}, len(up.x))
    tiles = [
        _tile(s, {"BR": rows, "BK": width}, gain) for s, width in zip((gate, up), columns, strict=True)
    ]
    run_kernel(
        dual_kernel,
        (gate.w.shape[0] * -(-gate.w.shape[1] // rows),),
        *(stage(gate), stage(up), gate.x if gain is None else gain, eps),
        T0=tiles[0],
        T1=tiles[1],
        ACT=activation,
        num_warps=warps,
        **launch_options(pdl),
    )


def segment_shape(segment: Segment, gain: Tensor | None) -> dict[str, int]:
    """Sizes as `tile_shape` has them; a mixing program has a tile of every block."""
    blocks, rows, width = segment.w.shape
    if segment.mix is not None:
        columns = min(power_of_two(width), max(2048 // power_of_two(blocks), 64))
        warps = 8 if gain is not None and blocks > 8 else 4  # four would spill
        return {"BR": min(power_of_two(rows), 4), "BK": columns, "num_warps": warps}
    sizes = {"size": segment.w.element_size(), "x_size": segment.x.element_size()}
    return tile_shape(rows, width, norm=norm_kind(segment.x, width, gain), **sizes)


def _pair_shapes(gate: Segment, up: Segment, gain: Tensor | None) -> list[dict[str, int]]:
    """As `segment_shape`, of both of a pair: `pair_tile`'s, else four rows at most."""
    shapes = [segment_shape(segment, gain) for segment in (gate, up)]
    chosen = {} if gain is not None else pair_tile(max(gate.w.shape[2], up.w.shape[2]))
    rows = min(chosen.get("BR", 4), power_of_two(gate.w.shape[1]))
    return [{**shape, **chosen, "BR": rows} for shape in shapes]


def _tile(s: Segment, shape: dict[str, int], gain: Tensor | None) -> Tile:
    mix = 0 if s.mix is None else power_of_two(s.mix.shape[0])
    norm = norm_kind(s.x, s.w.shape[2], gain)
    return Tile(shape["BR"], shape["BK"], norm, s.bias is not None, mix, len(s.x))
