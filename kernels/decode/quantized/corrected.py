"""Kernels for stages of ``W = Q + U V`` in one launch: V x by its first programs, then Q x + U (V x).

The programs of V come first in the grid, so they run before any that needs them; they count their
arrivals in `counter`, two words that are 0 between launches. A program of Q streams its rows while V
is on its way, waits for the count at its end, and adds U z. The last program to leave puts the counter
back. So the correction costs no phase of its own. For V in plain numbers, which come from a launch
before, `grouped` and `dual` of the file beside this one do: their stages add U z, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.quantized.formats import form_of
from blr.kernels.decode.quantized.launch import complete, quantized_tile, stage, token_slots
from blr.kernels.decode.quantized.segments import QuantizedSegment, QuantizedStage, QuantizedTile

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.decode.gemv.triton import activate, store_rows
    from blr.kernels.decode.quantized.correction import arrive, leave
    from blr.kernels.decode.quantized.grouped import (
        apart,
        pair_stages,
        run_segment,
        same_format,
        segment_shape,
    )
    from blr.kernels.decode.quantized.pair import pair_rows
    from blr.kernels.decode.quantized.triton import stage_products, stage_rows, stage_start
except ImportError as error:
    raise ImportError("these kernels need triton") from error

WIDEST = 512  # quads of a row of V that are read at once


@triton.jit
def run_firsts(
    program, v0, v1, v2, ends, gain, eps, tokens, counter,
    COUNT: tl.constexpr, N: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program number `program` of those of COUNT first stages, and its arrival."""
    if program < ends[0]:
        run_segment(program, v0, gain, eps, tokens, N, V0, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= ends[0]) & (program < ends[1]):
            run_segment(program - ends[0], v1, gain, eps, tokens, N, V1, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= ends[1]:
            run_segment(program - ends[1], v2, gain, eps, tokens, N, V2, PDL)
    arrive(counter)


@triton.jit
def run_added(
    tile, s, gain, eps, tokens, N: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr, ADD: tl.constexpr
):
    """One tile of a segment, stored, or added to what its result holds."""
    started = stage_start(tile, s, T)
    if PDL:
        gdc_wait()
    products = stage_products(started, s, gain, tokens, N, T)
    first, second, out, ok = stage_rows(products, started, s, eps, tokens, N, T)
    store_rows(s, s.y, s.y_token, first, second, out, ok, tokens, N, ADD)


@triton.jit
def corrected_kernel(
    v0, v1, v2, v_ends, s0, s1, s2, ends, gain, eps, tokens, counter,
    COUNT: tl.constexpr, N: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments and their corrections. v_ends, ends: programs up to the end of each."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    firsts = v_ends[2]
    if program < firsts:
        run_firsts(program, v0, v1, v2, v_ends, gain, eps, tokens, counter, COUNT, N, V0, V1, V2, PDL)
    else:
        program -= firsts
        if program < ends[0]:
            run_added(program, s0, gain, eps, tokens, N, T0, PDL, ADD)
        if COUNT > 1:  # noqa: SIM102
            if (program >= ends[0]) & (program < ends[1]):
                run_added(program - ends[0], s1, gain, eps, tokens, N, T1, PDL, ADD)
        if COUNT > 2:  # noqa: SIM102
            if program >= ends[1]:
                run_added(program - ends[1], s2, gain, eps, tokens, N, T2, PDL, ADD)
        leave(counter, ends[2])


@triton.jit
def corrected_dual_kernel(
    v0, v1, v_ends, s0, s1, apart, gain, eps, tokens, programs, counter,
    N: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up and their corrections: ``act(gate) ⊙ up``. programs: of them."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    firsts = v_ends[1]
    if program < firsts:
        run_firsts(program, v0, v1, v1, v_ends, gain, eps, tokens, counter, 2, N, V0, V1, V1, PDL)
    else:
        program -= firsts
        if N <= 2:
            gate, up, gate2, up2, out, ok = pair_rows(
                program, s0, apart, s1, gain, eps, tokens, N, T0, T1, PDL
            )  # fmt: skip
        else:
            started0 = stage_start(program, s0, T0)
            started1 = stage_start(program, s1, T1)
            if PDL:
                gdc_wait()
            products = stage_products(started0, s0, gain, tokens, N, T0)
            gate, gate2, out, ok = stage_rows(products, started0, s0, eps, tokens, N, T0)
            products = stage_products(started1, s1, gain, tokens, N, T1)
            up, up2, out, ok = stage_rows(products, started1, s1, eps, tokens, N, T1)
        first = activate(gate, ACT) * up
        second = activate(gate2, ACT) * up2
        store_rows(s1, s1.y, 0, first, second, out, ok, tokens, N, False)
        leave(counter, programs)


def corrected(
    segments: Sequence[QuantizedSegment],
    counter: Tensor,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    add: bool = False,
    pdl: bool = False,
    **config: int,
) -> None:
    """`segments.grouped` of one to three corrected segments of one format, in one launch.

    Args:
        counter: [2] int32 of this launch's own, zeros before and after.
        add: to what the results hold.
        config: BR, BQ and num_warps of the segments in place of `tile_shape`'s.

    Raises:
        ValueError: a correction whose first stage is not quantized, or as `grouped`.
    """
    tokens, firsts = same_format(segments), _firsts(segments)
    total = sum(s.packed.shape[0] * s.packed.shape[1] for s in segments)
    shapes = [{**segment_shape(s, tokens, total), **config} for s in segments]
    warps = max(shape["num_warps"] for shape in shapes)
    tiles = [
        quantized_tile(s, complete(shape, warps, tokens), gain, True)
        for s, shape in zip(segments, shapes, strict=True)
    ]
    ends, (v, v_tiles, v_ends) = _ends(segments, tiles), _first_stages(firsts, tokens, gain, warps)
    stages = [stage(s, counter, v_ends[-1]) for s in segments]
    corrected_kernel[(v_ends[-1] + ends[-1],)](
        *(*_thrice(v), _thrice(v_ends), *_thrice(stages), _thrice(ends)),
        *(segments[0].x if gain is None else gain, eps, tokens, counter),
        COUNT=len(segments),
        N=token_slots(tokens),
        **dict(zip(("V0", "V1", "V2"), _thrice(v_tiles), strict=True)),
        **dict(zip(("T0", "T1", "T2"), _thrice(tiles), strict=True)),
        ADD=add,
        num_warps=warps,
        **launch_options(pdl),
    )


def corrected_dual(
    gate: QuantizedSegment,
    up: QuantizedSegment,
    counter: Tensor,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    **config: int,
) -> None:
    """`segments.dual` of two corrected segments in one launch; arguments as of `corrected`."""
    tokens, firsts = same_format((gate, up)), _firsts((gate, up))
    *_, warps = pair_stages(gate, up, tokens, gain, config)
    v, v_tiles, v_ends = _first_stages(firsts, tokens, gain, warps)
    counting = counter, v_ends[-1]
    first, second, tiles, warps = pair_stages(gate, up, tokens, gain, config, counting)
    programs = gate.packed.shape[0] * -(-gate.packed.shape[1] // tiles[0].BR)
    corrected_dual_kernel[(v_ends[-1] + programs,)](
        *(*v, tuple(v_ends), first, second, apart(first, second)),
        *(gate.x if gain is None else gain, eps, tokens, programs, counter),
        N=token_slots(tokens),
        V0=v_tiles[0],
        V1=v_tiles[1],
        T0=tiles[0],
        T1=tiles[1],
        ACT=activation,
        num_warps=warps,
        **launch_options(pdl),
    )


def _firsts(segments: Sequence[QuantizedSegment]) -> list[QuantizedSegment]:
    found = []
    for s in segments:
        if s.correction is None or not isinstance(s.correction.first, QuantizedSegment):
            raise ValueError("corrected: a segment without a correction, or with a plain first stage")
        found.append(s.correction.first)
    return found


def _first_stages(
    firsts: Sequence[QuantizedSegment], tokens: int, gain: Tensor | None, warps: int
) -> tuple[list[QuantizedStage], list[QuantizedTile], list[int]]:
    """First stages, their tiles, and the programs up to the end of each."""
    tiles = [
        quantized_tile(s, complete(_first_shape(s, tokens, warps), warps, tokens), gain) for s in firsts
    ]
    return [stage(s) for s in firsts], tiles, _ends(firsts, tiles)


def _first_shape(s: QuantizedSegment, tokens: int, warps: int) -> dict[str, int]:
    """As few rows a program as there can be: all wait for the last of them."""
    if s.mix is not None or tokens > 2:
        return segment_shape(s, tokens, 0)
    quads = max(power_of_two(form_of(s.bits, s.group).quads(s.K)), 4)
    return {"BR": 1, "BQ": min(quads, WIDEST), "num_warps": warps}


def _ends(segments: Sequence[QuantizedSegment], tiles: Sequence[QuantizedTile]) -> list[int]:
    sizes = zip(segments, tiles, strict=True)
    blocks = [(1 if t.MIX else s.packed.shape[0]) * -(-s.packed.shape[1] // t.BR) for s, t in sizes]
    return [*accumulate(blocks)]


def _thrice(found: Sequence[Any]) -> tuple[Any, ...]:
    """Three of one to three, the last ones the same."""
    return (*found, found[-1], found[-1])[:3]
