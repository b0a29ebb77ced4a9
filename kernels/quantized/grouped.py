"""Kernels for several stages with quantized weights in one launch: q|k|v, gate|up, gate ⊙ up.

As kernels/gemv/grouped.py, with the row functions of `triton.py` beside this file. The segments of
a launch may differ in everything but the number of tokens and of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr.kernels.gemv.launch import power_of_two
from blr.kernels.quantized.launch import as_words, tile_shape
from blr.kernels.quantized.segments import QuantizedSegment

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents

    from blr.kernels.gemv.grouped import store_rows
    from blr.kernels.gemv.triton import activate
    from blr.kernels.quantized.mixed import mixed_segment
    from blr.kernels.quantized.triton import inverse_rms, rows_by_dot, rows_by_fma
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def stage_rows(
    tile, seg, x_token, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Products of tile number `tile` of a segment: (first, second, outputs, valid).

    seg: (x, x_block, w, w_block, w_row, scale, scale_block, scale_row, s, s_out, s_in, s_rank,
    bias, y, rows, K, blocks, part); w and its strides count words of 4 bytes.
    NORM: 1 for an RMS norm of inputs that all blocks share, 2 of inputs that they split.
    first, second: [BR] of one or two tokens, or both the [BR, N] of more. outputs: [BR].
    """
    (
        x, x_block, w, w_block, w_row, scale, scale_block, scale_row, _s, _out, _in, _rank, bias,
        _y, rows_per_block, K, blocks, part,
    ) = seg  # fmt: skip
    tiles = tl.cdiv(rows_per_block, BR)
    block = tile // tiles
    rows = (tile % tiles) * BR + tl.arange(0, BR)
    ok = rows < rows_per_block
    w += block.to(tl.int64) * w_block
    scale += block.to(tl.int64) * scale_block
    whole = x
    x += block * x_block
    if NORM == 2:
        gain += block * x_block
    out = (rows // part) * (blocks * part) + block * part + rows % part
    constant = tl.zeros([BR], tl.float32)
    if BIAS:
        constant = tl.load(bias + out, mask=ok, other=0.0).to(tl.float32)
    if N <= 2:
        first, second = rows_by_fma(
            x, x_token, gain, eps, w, w_row, scale, scale_row, rows.to(tl.int64), ok, K,
            N, BR, BQ, BITS, NORM, WAIT,
        )  # fmt: skip
        if NORM == 2:
            one = tl.arange(0, 1)
            first *= inverse_rms(whole, x_token, one, one < tokens, blocks * K, eps, 1024)
            second *= inverse_rms(whole, x_token, one + N - 1, one < tokens, blocks * K, eps, 1024)
        return first + constant, second + constant, out, ok
    else:
        sums = rows_by_dot(
            x, x_token, tokens, gain, eps, w, w_row, scale, scale_row, rows.to(tl.int64), ok, K,
            N, BR, BQ, BITS, NORM, WAIT,
        )  # fmt: skip
        if NORM == 2:
            token = tl.arange(0, N)
            norm = inverse_rms(whole, x_token, token, token < tokens, blocks * K, eps, 128)
            sums *= norm[None, :]
        sums += constant[:, None]
        return sums, sums, out, ok


@triton.jit
def run_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, NORM: tl.constexpr,
    MIX: tl.constexpr, BIAS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One tile of a segment, stored; of MIX blocks that it mixes, if MIX."""
    if MIX > 0:
        mixed_segment(tile, seg, x_token, y_token, gain, eps, tokens, MIX, BITS, BR, BQ, NORM, WAIT)
    else:
        first, second, out, ok = stage_rows(
            tile, seg, x_token, gain, eps, tokens, N, BITS, BR, BQ, NORM, BIAS, WAIT
        )
        store_rows(seg[13], y_token, first, second, out, ok, tokens, N)


@triton.jit
def grouped_kernel(
    seg0, seg1, seg2, x_token0, x_token1, x_token2, y_token0, y_token1, y_token2,
    programs0, programs1, gain, eps, tokens,
    COUNT: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
    BR0: tl.constexpr, BQ0: tl.constexpr, NORM0: tl.constexpr, MIX0: tl.constexpr, BIAS0: tl.constexpr,
    BR1: tl.constexpr, BQ1: tl.constexpr, NORM1: tl.constexpr, MIX1: tl.constexpr, BIAS1: tl.constexpr,
    BR2: tl.constexpr, BQ2: tl.constexpr, NORM2: tl.constexpr, MIX2: tl.constexpr, BIAS2: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, seg0, x_token0, y_token0, gain, eps, tokens,
                    N, BITS, BR0, BQ0, NORM0, MIX0, BIAS0, PDL)  # fmt: skip
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, seg1, x_token1, y_token1, gain, eps, tokens,
                        N, BITS, BR1, BQ1, NORM1, MIX1, BIAS1, PDL)  # fmt: skip
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, seg2, x_token2, y_token2, gain, eps, tokens,
                        N, BITS, BR2, BQ2, NORM2, MIX2, BIAS2, PDL)  # fmt: skip


@triton.jit
def dual_kernel(
    seg0, seg1, x_token0, x_token1, y_token, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr, BR: tl.constexpr,
    BQ0: tl.constexpr, NORM0: tl.constexpr, BIAS0: tl.constexpr,
    BQ1: tl.constexpr, NORM1: tl.constexpr, BIAS1: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    gate, gate2, out, ok = stage_rows(
        program, seg0, x_token0, gain, eps, tokens, N, BITS, BR, BQ0, NORM0, BIAS0, PDL
    )
    up, up2, out, ok = stage_rows(
        program, seg1, x_token1, gain, eps, tokens, N, BITS, BR, BQ1, NORM1, BIAS1, False
    )
    first = activate(gate, ACT) * up
    second = first
    if N == 2:
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
    tiles = [{**_tile(s, tokens), **(config[i] if config else {})} for i, s in enumerate(segments)]
    ends, constants = [0], {}
    for s, tile in zip(segments, tiles, strict=True):
        ends.append(ends[-1] + _programs(s, tile))
    three = [(*segments, *segments[:1] * 2)[i] for i in range(3)]
    for i, s in enumerate(three):
        chosen = (*tiles, *tiles[:1] * 2)[i]
        mix = 0 if s.mix is None else power_of_two(s.mix.shape[0])
        constants |= {f"BR{i}": chosen["BR"], f"MIX{i}": mix, **_constants(s, chosen, i, gain)}
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
        num_warps=max(t["num_warps"] for t in tiles),
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
    """`segments.dual` in one launch; config: BR, BQ0, BQ1, num_warps in place of `tile_shape`'s."""
    tokens, padded = _tokens((gate, up))
    first, second = _tile(gate, tokens), _tile(up, tokens)
    rows = min(first["BR"], second["BR"])
    constants = {"BR": rows, **_constants(gate, first, 0, gain)}
    constants |= _constants(up, second, 1, gain)
    constants |= {"num_warps": max(first["num_warps"], second["num_warps"]), **config}
    dual_kernel[(gate.packed.shape[0] * -(-gate.packed.shape[1] // constants["BR"]),)](
        *(_arguments(gate), _arguments(up)),
        *(gate.x.stride(0), up.x.stride(0), up.y.stride(0)),
        *(gate.x if gain is None else gain, eps, tokens),
        N=padded,
        BITS=gate.bits,
        PDL=pdl,
        ACT=activation,
        **constants,
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


def _tile(s: QuantizedSegment, tokens: int) -> dict[str, int]:
    """Sizes as `tile_shape` has them; a mixing program has a tile of every block."""
    if s.mix is None:
        return tile_shape(s.packed.shape[1], s.K, tokens, s.bits)
    blocks, quads = (power_of_two(n) for n in (s.packed.shape[0], -(-s.K // 128) * s.bits))
    return {
        "BR": min(power_of_two(s.packed.shape[1]), 4),
        "BQ": min(quads, max(128 // blocks, 8)),
        "num_warps": 8,
    }


def _programs(s: QuantizedSegment, tile: dict[str, int]) -> int:
    tiles = -(-s.packed.shape[1] // tile["BR"])
    return tiles if s.mix is not None else s.packed.shape[0] * tiles


def _constants(
    s: QuantizedSegment, tile: dict[str, int], number: int, gain: Tensor | None
) -> dict[str, Any]:
    norm = 0 if gain is None else 1 if s.x.shape[1] == s.K else 2
    return {f"BQ{number}": tile["BQ"], f"BIAS{number}": s.bias is not None, f"NORM{number}": norm}


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
