"""Kernels for several stages with quantized weights in one launch: q|k|v, gate|up, gate ⊙ up.

As kernels/decode/gemv/grouped.py, with the row functions of `triton.py` beside this file. The segments
of a launch may differ in everything but the number of tokens and of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr.kernels.decode.gemv.launch import checked_tokens, launch_options, run_grouped
from blr.kernels.decode.quantized.launch import (
    complete,
    mixed_shape,
    quantized_tile,
    stage,
    tile_shape,
    token_slots,
)
from blr.kernels.decode.quantized.segments import QuantizedSegment, QuantizedStage, QuantizedTile

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.decode.gemv.triton import activate, store_rows
    from blr.kernels.decode.quantized.mixed import mixed_segment
    from blr.kernels.decode.quantized.pair import pair_rows
    from blr.kernels.decode.quantized.triton import stage_products, stage_rows, stage_start
except ImportError as error:
    raise ImportError("these kernels need triton") from error

# What `pair_rows` reads of the second stage by its distance from the first.
APART = {*("x", "x_token", "x_block", "w", "w_block", "w_row", "scale", "scale_block", "scale_row", "K")}


@triton.jit
def run_segment(
    tile, s, gain, eps, tokens, N: tl.constexpr, T: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """One tile of a segment, stored; of T.MIX blocks that it mixes, if there are any."""
    if T.MIX > 0:
        mixed_segment(tile, s, gain, eps, tokens, T.MIX, T, WAIT)
    else:
        started = stage_start(tile, s, T)
        if WAIT:
            gdc_wait()
        products = stage_products(started, s, gain, tokens, N, T)
        first, second, out, ok = stage_rows(products, started, s, eps, tokens, N, T)
        store_rows(s, s.y, 0, first, second, out, ok, tokens, N, False)


@triton.jit
def grouped_kernel(
    s0, s1, s2, programs0, programs1, gain, eps, tokens,
    COUNT: tl.constexpr, N: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, s0, gain, eps, tokens, N, T0, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, s1, gain, eps, tokens, N, T1, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, s2, gain, eps, tokens, N, T2, PDL)


@triton.jit
def dual_kernel(
    s0, s1, apart, gain, eps, tokens,
    N: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
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


def grouped(
    segments: Sequence[QuantizedSegment],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    config: Sequence[dict[str, int]] | None = None,
) -> None:
    """`segments.grouped` in one launch.

    Args:
        segments: one to three of the same bits, of 1 to 16 tokens, with columns of stride 1.
        config: BR, BQ and num_warps of each segment in place of `tile_shape`'s; the launch has the
            most warps of any.
    """
    tokens = same_format(segments)
    total = sum(s.packed.shape[0] * s.packed.shape[1] for s in segments)
    shapes = [
        {**segment_shape(s, tokens, total), **(config[i] if config else {})}
        for i, s in enumerate(segments)
    ]
    warps = max(shape["num_warps"] for shape in shapes)
    run_grouped(
        grouped_kernel,
        [stage(s) for s in segments],
        [
            quantized_tile(s, complete(shape, warps, tokens), gain)
            for s, shape in zip(segments, shapes, strict=True)
        ],
        gain=gain,
        eps=eps,
        N=token_slots(tokens),
        num_warps=warps,
        **launch_options(pdl),
    )


def dual(
    gate: QuantizedSegment,
    up: QuantizedSegment,
    *,
    activation: str,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    **config: Any,
) -> None:
    """`segments.dual` in one launch; config: BR, BQ, num_warps.

    By default those of `tile_shape`, where half of the lanes are for each of one or two tokens' rows
    and, if that leaves less than a chunk, twice the warps.
    """
    tokens = same_format((gate, up))
    first, second, tiles, warps = pair_stages(gate, up, tokens, gain, config)
    dual_kernel[(gate.packed.shape[0] * -(-gate.packed.shape[1] // tiles[0].BR),)](
        *(first, second, apart(first, second), gate.x if gain is None else gain, eps, tokens),
        N=token_slots(tokens),
        T0=tiles[0],
        T1=tiles[1],
        ACT=activation,
        num_warps=warps,
        **launch_options(pdl),
    )


def pair_stages(
    gate: QuantizedSegment,
    up: QuantizedSegment,
    tokens: int,
    gain: Tensor | None,
    config: dict[str, int],
    counting: tuple[Tensor | None, int] = (None, 0),
) -> tuple[QuantizedStage, QuantizedStage, list[QuantizedTile], int]:
    """Both stages of a `dual`, their tiles and the warps of a program. counting: as `stage` takes it."""
    wider, halves = max(gate, up, key=lambda s: s.K), 2 if tokens <= 2 else 1
    shape = segment_shape(wider, tokens, wider.packed.shape[0] * wider.packed.shape[1], pair=True)
    shape |= {"num_warps": max(shape["num_warps"], halves * shape["BQ"] // 32), **config}
    warps = shape["num_warps"]
    shape = complete(shape, max(warps // halves, 1), tokens)
    awaits = counting[0] is not None
    tiles = [quantized_tile(s, shape, gain, awaits) for s in (gate, up)]
    unit, one = min(tile.UNIT for tile in tiles), all(tile.ONE for tile in tiles)
    full = all(tile.FULL for tile in tiles)
    tiles = [tile._replace(UNIT=unit, ONE=one, FULL=full) for tile in tiles]
    first, second = (stage(s, *counting, unit) for s in (gate, up))
    return first, second, tiles, warps


def same_format(segments: Sequence[QuantizedSegment]) -> int:
    """Tokens of a launch. Raises ValueError for too many, or segments of different formats."""
    tokens, found = checked_tokens(segments), {(s.bits, s.group) for s in segments}
    if len(found) != 1:
        raise ValueError(f"grouped gemv: segments of {sorted(found)}; one launch takes one format")
    return tokens


def segment_shape(s: QuantizedSegment, tokens: int, total: int, pair: bool = False) -> dict[str, int]:
    """Sizes of `tile_shape` in a launch of `total` rows; a mixing program has a tile of every block."""
    blocks, rows, _ = s.packed.shape
    if s.mix is not None:
        return mixed_shape(blocks, rows, s.K, s.bits, s.group)
    return tile_shape(rows, s.K, tokens, s.bits, total, pair, s.group)


def apart(first: QuantizedStage, second: QuantizedStage) -> QuantizedStage:
    """From one stage to another, as `pair_rows` takes it."""
    fields = zip(QuantizedStage._fields, first, second, strict=True)
    return QuantizedStage(*(_distance(a, b) if name in APART else 0 for name, a, b in fields))


def _distance(first: Any, second: Any) -> int:
    """From one argument of a kernel to another of the same kind: elements between two tensors."""
    if isinstance(first, Tensor):
        return (second.data_ptr() - first.data_ptr()) // first.element_size()
    return second - first
