"""Kernels for several stages with quantized weights in one launch: q|k|v, gate|up, gate ⊙ up.

As kernels/decode/gemv/grouped.py, with the row functions of `triton.py` beside this file. The segments
of a launch may differ in everything but the number of tokens and of bits.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.common.launching import run_kernel
from blr.kernels.decode.gemv.launch import launch_options, run_grouped, tokens_of
from blr.kernels.decode.gemv.triton import activate, store_rows
from blr.kernels.decode.quantized.launch import (
    complete,
    mixed_shape,
    quantized_tile,
    stage,
    tile_shape,
)
from blr.kernels.decode.quantized.mixed import mixed_segment
from blr.kernels.decode.quantized.segments import QuantizedSegment, QuantizedTile
from blr.kernels.decode.quantized.triton import stage_products, stage_rows, stage_start


@triton.jit
def run_segment(tile, s, gain, eps, T: tl.constexpr, ADD: tl.constexpr, WAIT: tl.constexpr):
    """One tile of a segment, stored, or added to what its result holds; of T.MIX blocks that it mixes,
    if there are any."""
    if T.MIX > 0:
        mixed_segment(tile, s, gain, eps, T.MIX, T, WAIT)
    else:
        started = stage_start(tile, s, T)
        if WAIT:
            gdc_wait()
        found, out, ok = stage_rows(stage_products(started, s, gain, T), started, s, eps, T)
        store_rows(s.y, found, out, ok, ADD)


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
    started0 = stage_start(program, s0, T0)
    started1 = stage_start(program, s1, T1)
    if PDL:
        gdc_wait()
    gate, out, ok = stage_rows(stage_products(started0, s0, gain, T0), started0, s0, eps, T0)
    up, out, ok = stage_rows(stage_products(started1, s1, gain, T1), started1, s1, eps, T1)
    store_rows(s1.y, activate(gate, ACT) * up, out, ok, False)


def grouped(
    segments: Sequence[QuantizedSegment],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    pdl: bool = False,
    config: Sequence[dict[str, int]] | None = None,
) -> None:
    """`segments.grouped` in one launch.

    Args:
        segments: one to three of the same bits, with columns of stride 1; of several tokens one launch
            each.
        add: to what the results hold; of none that is mixed.
        config: BR, BQ and num_warps of each segment in place of `tile_shape`'s; the launch has the
            most warps of any.
    """
    check_format(segments)
    total = sum(s.packed.shape[0] * s.packed.shape[1] for s in segments)
    shapes = [
        {**segment_shape(s, total), **(config[i] if config else {})} for i, s in enumerate(segments)
    ]
    warps = max(shape["num_warps"] for shape in shapes)
    tiles = tiles_of(segments, shapes, warps, gain)
    options: dict[str, Any] = {"gain": gain, "eps": eps, "ADD": add, "num_warps": warps}
    options |= launch_options(pdl)
    for token in tokens_of(segments):
        run_grouped(grouped_kernel, [stage(s) for s in token], tiles, **options)


def dual(
    gate: QuantizedSegment,
    up: QuantizedSegment,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    **config: int,
) -> None:
    """`segments.dual` in one launch a token; config: BR, BQ, num_warps in place of `tile_shape`'s."""
    check_format((gate, up))
    total = 2 * gate.packed.shape[0] * gate.packed.shape[1]
    shape = {**segment_shape(max(gate, up, key=lambda s: s.K), total), "BYTES": 0, **config}
    warps = shape["num_warps"]
    tiles = tiles_of((gate, up), [shape, shape], warps, gain)
    programs = gate.packed.shape[0] * -(-gate.packed.shape[1] // tiles[0].BR)
    for one, two in tokens_of((gate, up)):
        run_kernel(
            dual_kernel,
            (programs,),
            *(stage(one), stage(two), gate.x if gain is None else gain, eps),
            T0=tiles[0],
            T1=tiles[1],
            ACT=activation,
            num_warps=warps,
            **launch_options(pdl),
        )


def tiles_of(
    segments: Sequence[QuantizedSegment],
    shapes: Sequence[dict[str, int]],
    warps: int,
    gain: Tensor | None,
) -> list[QuantizedTile]:
    """Tiles of segments in a launch of `warps`."""
    pairs = zip(segments, shapes, strict=True)
    return [quantized_tile(s, complete(shape, warps), gain) for s, shape in pairs]


def check_format(segments: Sequence[QuantizedSegment]) -> None:
    """Raise ValueError for segments of different formats."""
    found = {(s.bits, s.group) for s in segments}
    if len(found) != 1:
        raise ValueError(f"grouped gemv: segments of {sorted(found)}; one launch takes one format")


def segment_shape(s: QuantizedSegment, total: int) -> dict[str, int]:
    """Sizes of `tile_shape` in a launch of `total` rows; a mixing program has a tile of every block."""
    blocks, rows, _ = s.packed.shape
    if s.mix is not None:
        return mixed_shape(blocks, rows, s.K, s.bits, s.group)
    return tile_shape(rows, s.K, s.bits, total, s.group)
