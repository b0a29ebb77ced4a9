"""Kernels for several stages with quantized weights in one launch: q|k|v, gate|up, gate ⊙ up.

As kernels/gemv/grouped.py, with the row functions of `triton.py` beside this file. The segments of
a launch may differ in everything but the number of tokens and of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr.kernels.gemv.launch import power_of_two
from blr.kernels.quantized.launch import as_words, complete, mixed_shape, one_chunk, tile_shape
from blr.kernels.quantized.segments import QuantizedSegment

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.gemv.grouped import store_rows
    from blr.kernels.gemv.triton import activate
    from blr.kernels.quantized.mixed import mixed_segment
    from blr.kernels.quantized.pair import pair_rows
    from blr.kernels.quantized.triton import stage_products, stage_rows, stage_start
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def run_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, T: tl.constexpr,
    NORM: tl.constexpr, MIX: tl.constexpr, BIAS: tl.constexpr, ONE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One tile of a segment, stored; of MIX blocks that it mixes, if MIX."""
    if MIX > 0:
        mixed_segment(tile, seg, x_token, y_token, gain, eps, tokens, MIX, BITS, BR, BQ, NORM, WAIT)
    else:
        started = stage_start(tile, seg, BR, BQ, T, BITS)
        if WAIT:
            gdc_wait()
        products = stage_products(started, seg, x_token, gain, tokens, N, BITS, BQ, NORM, ONE)
        first, second, out, ok = stage_rows(
            products, started, seg, x_token, eps, tokens, N, BQ, NORM, BIAS
        )
        store_rows(seg[13], y_token, first, second, out, ok, tokens, N)


@triton.jit
def grouped_kernel(
    seg0, seg1, seg2, x_token0, x_token1, x_token2, y_token0, y_token1, y_token2,
    programs0, programs1, gain, eps, tokens,
    COUNT: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
    BR0: tl.constexpr, BQ0: tl.constexpr, T0: tl.constexpr, NORM0: tl.constexpr,
    MIX0: tl.constexpr, BIAS0: tl.constexpr, ONE0: tl.constexpr,
    BR1: tl.constexpr, BQ1: tl.constexpr, T1: tl.constexpr, NORM1: tl.constexpr,
    MIX1: tl.constexpr, BIAS1: tl.constexpr, ONE1: tl.constexpr,
    BR2: tl.constexpr, BQ2: tl.constexpr, T2: tl.constexpr, NORM2: tl.constexpr,
    MIX2: tl.constexpr, BIAS2: tl.constexpr, ONE2: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, seg0, x_token0, y_token0, gain, eps, tokens,
                    N, BITS, BR0, BQ0, T0, NORM0, MIX0, BIAS0, ONE0, PDL)  # fmt: skip
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, seg1, x_token1, y_token1, gain, eps, tokens,
                        N, BITS, BR1, BQ1, T1, NORM1, MIX1, BIAS1, ONE1, PDL)  # fmt: skip
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, seg2, x_token2, y_token2, gain, eps, tokens,
                        N, BITS, BR2, BQ2, T2, NORM2, MIX2, BIAS2, ONE2, PDL)  # fmt: skip


@triton.jit
def dual_kernel(
    seg0, seg1, apart, x_token0, x_token1, x_token_apart, y_token, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr,
    BQ: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if N <= 2:
        gate, up, gate2, up2, out, ok = pair_rows(
            program, seg0, apart, seg1[12], x_token0, x_token_apart, gain, eps, tokens,
            N, BITS, BR, BQ, T, NORM, BIAS0, BIAS1, ONE, PDL,
        )  # fmt: skip
    else:
        started0 = stage_start(program, seg0, BR, BQ, T, BITS)
        started1 = stage_start(program, seg1, BR, BQ, T, BITS)
        if PDL:
            gdc_wait()
        products = stage_products(started0, seg0, x_token0, gain, tokens, N, BITS, BQ, NORM, ONE)
        gate, gate2, out, ok = stage_rows(
            products, started0, seg0, x_token0, eps, tokens, N, BQ, NORM, BIAS0
        )
        products = stage_products(started1, seg1, x_token1, gain, tokens, N, BITS, BQ, NORM, ONE)
        up, up2, out, ok = stage_rows(
            products, started1, seg1, x_token1, eps, tokens, N, BQ, NORM, BIAS1
        )
    first = activate(gate, ACT) * up
    second = activate(gate2, ACT) * up2
    store_rows(seg1[13], y_token, first, second, out, ok, tokens, N)


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
    tokens, padded = _tokens(segments)
    total = sum(s.packed.shape[0] * s.packed.shape[1] for s in segments)
    chosen = [
        {**_tile(s, tokens, total), **(config[i] if config else {})} for i, s in enumerate(segments)
    ]
    warps = max(tile["num_warps"] for tile in chosen)
    tiles = [complete(tile, warps, tokens) for tile in chosen]
    ends, constants = [0], {}
    for s, tile in zip(segments, tiles, strict=True):
        ends.append(ends[-1] + _programs(s, tile))
    three = [(*segments, *segments[:1] * 2)[i] for i in range(3)]
    for i, s in enumerate(three):
        tile = (*tiles, *tiles[:1] * 2)[i]
        mix = 0 if s.mix is None else power_of_two(s.mix.shape[0])
        constants |= {f"MIX{i}": mix, **_constants(s, tile, i, gain)}
    grouped_kernel[(ends[-1],)](
        *(_arguments(s) for s in three),
        *(s.x.stride(0) for s in three),
        *(s.y.stride(0) for s in three),
        *(ends[1], ends[min(2, len(segments))]),
        *(segments[0].x if gain is None else gain, eps, tokens),
        COUNT=len(segments),
        N=padded,
        BITS=segments[0].bits,
        PDL=pdl,
        num_warps=warps,
        **constants,
        **({"launch_pdl": True} if pdl else {}),
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
    tokens, padded = _tokens((gate, up))
    wider, halves = max(gate, up, key=lambda s: s.K), 2 if tokens <= 2 else 1
    tile = _tile(wider, tokens, wider.packed.shape[0] * wider.packed.shape[1], pair=True)
    tile |= {"num_warps": max(tile["num_warps"], halves * tile["BQ"] // 32), **config}
    warps = tile["num_warps"]
    tile = complete(tile, max(warps // halves, 1), tokens)
    constants = _constants(wider, tile, 0, gain)
    both = _arguments(gate), _arguments(up)
    steps = gate.x.stride(0), up.x.stride(0)
    dual_kernel[(gate.packed.shape[0] * -(-gate.packed.shape[1] // tile["BR"]),)](
        *(*both, _apart(*both), *steps, steps[1] - steps[0], up.y.stride(0)),
        *(gate.x if gain is None else gain, eps, tokens),
        N=padded,
        BITS=gate.bits,
        PDL=pdl,
        ACT=activation,
        BIAS0=gate.bias is not None,
        BIAS1=up.bias is not None,
        **{name: constants[f"{name}0"] for name in ("BR", "BQ", "T", "NORM", "ONE")},
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def _tokens(segments: Sequence[QuantizedSegment]) -> tuple[int, int]:
    """Tokens of a launch, and the number that its kernel is made for."""
    tokens, bits = segments[0].x.shape[0], {s.bits for s in segments}
    if not 1 <= tokens <= 16:
        raise ValueError(f"grouped gemv: {tokens} tokens; it takes 1 to 16")
    if len(bits) != 1:
        raise ValueError(f"grouped gemv: segments of {sorted(bits)} bits; one launch takes one kind")
    return tokens, tokens if tokens <= 2 else 16


def _tile(s: QuantizedSegment, tokens: int, total: int, pair: bool = False) -> dict[str, int]:
    """Sizes of `tile_shape` in a launch of `total` rows; a mixing program has a tile of every block."""
    blocks, rows, _ = s.packed.shape
    if s.mix is not None:
        return mixed_shape(blocks, rows, s.K, s.bits)
    return tile_shape(rows, s.K, tokens, s.bits, total, pair)


def _programs(s: QuantizedSegment, tile: dict[str, int]) -> int:
    tiles = -(-s.packed.shape[1] // tile["BR"])
    return tiles if s.mix is not None else s.packed.shape[0] * tiles


def _constants(
    s: QuantizedSegment, tile: dict[str, int], number: int, gain: Tensor | None
) -> dict[str, Any]:
    norm = 0 if gain is None else 1 if s.x.shape[1] == s.K else 2
    constants = {name: tile[name] for name in ("BR", "BQ", "T")}
    constants |= {"BIAS": s.bias is not None, "NORM": norm, "ONE": one_chunk(s.K, s.bits, tile["BQ"])}
    return {f"{name}{number}": value for name, value in constants.items()}


def _apart(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[int, ...]:
    """From one tuple of `_arguments` to another, as `pair_rows` takes it; 0 where it reads nothing."""
    read = (*range(8), 15)
    pairs = enumerate(zip(first, second, strict=True))
    return tuple(_distance(a, b) if place in read else 0 for place, (a, b) in pairs)


def _distance(first: Tensor | int, second: Tensor | int) -> int:
    """From one argument of a kernel to another of the same kind: elements between two tensors."""
    if isinstance(first, Tensor):
        return (second.data_ptr() - first.data_ptr()) // first.element_size()
    return second - first


def _arguments(s: QuantizedSegment) -> tuple[Any, ...]:
    """The tuple that `stage_rows` takes."""
    words, none = as_words(s.packed, s.bits, s.K), s.x
    return (
        *(s.x, 0 if s.x.shape[1] == s.K else s.K),
        *(words, words.stride(0), words.stride(1)),
        *(s.scale, s.scale.stride(0), s.scale.stride(1)),
        *(none if s.mix is None else s.mix, *((0, 0, 0) if s.mix is None else s.mix.stride())),
        none if s.bias is None else s.bias,
        *(s.y, s.packed.shape[1], s.K, s.packed.shape[0], s.part or s.packed.shape[1]),
    )
