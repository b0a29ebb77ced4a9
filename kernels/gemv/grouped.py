"""Kernels for several decoding stages in one launch: q|k|v, gate|up, and gate ⊙ up.

The stages of one launch may differ in everything but the number of tokens: each has its own code,
specialized by its own strides and blocks, and a program picks one by its number. The arithmetic is
that of `triton.py` beside this file; the reference is in segments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr.kernels.gemv.launch import norm_kind, pair_tile, power_of_two, tile_shape, token_slots
from blr.kernels.gemv.segments import Segment, shared_input

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.gemv.triton import activate, rows_by_dot, rows_by_fma
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def stage_rows(
    tile, seg, x_token, gain, eps, tokens,
    N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Products of tile number `tile` of a segment: (first, second, outputs, valid).

    seg: (x, x_block, w, w_block, w_row, w_col, s, s_out, s_in, s_rank, bias, y, rows, K, blocks,
    part).
    first, second: [BR] of one or two tokens, or both the [BR, N] of more. outputs: [BR].
    """
    (
        x,
        x_block,
        w,
        w_block,
        w_row,
        w_col,
        _s,
        _so,
        _si,
        _sr,
        bias,
        _y,
        rows_per_block,
        K,
        blocks,
        part,
    ) = seg
    tiles = tl.cdiv(rows_per_block, BR)
    block = tile // tiles
    rows = (tile % tiles) * BR + tl.arange(0, BR)
    ok = rows < rows_per_block
    w += block.to(tl.int64) * w_block
    width = blocks * x_block if NORM == 2 else K
    here = x + block * x_block
    gain += block * x_block
    out = (rows // part) * (blocks * part) + block * part + rows % part
    constant = tl.zeros([BR], tl.float32)
    if BIAS:
        constant = tl.load(bias + out, mask=ok, other=0.0).to(tl.float32)
    if N <= 2:
        first, second = rows_by_fma(
            here, x, x_token, width, gain, eps, w, rows.to(tl.int64), ok, K, w_row, w_col,
            N, BR, BK, NORM, WAIT,
        )  # fmt: skip
        return first + constant, second + constant, out, ok
    else:
        sums = rows_by_dot(
            here, x, x_token, width, tokens, gain, eps, w, rows.to(tl.int64), ok, K, w_row, w_col,
            N, BR, BK, NORM, WAIT,
        )  # fmt: skip
        sums += constant[:, None]
        return sums, sums, out, ok


@triton.jit
def store_rows(y, y_token, first, second, out, ok, tokens, N: tl.constexpr):
    """Store what `stage_rows` gave."""
    if N <= 2:
        tl.store(y + out, first.to(y.dtype.element_ty), mask=ok)
        if N == 2:
            tl.store(y + y_token + out, second.to(y.dtype.element_ty), mask=ok)
    else:
        token = tl.arange(0, N)
        mask = ok[:, None] & (token < tokens)[None, :]
        tl.store(y + token[None, :] * y_token + out[:, None], first.to(y.dtype.element_ty), mask=mask)


@triton.jit
def mixed_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    L: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """BR ranks of all blocks (up to L) and their mix: ``y[k, r] = Σ_l s[k, l, r] (w[l, r, :] · x_l)``.

    The first chunk of weights serves all tokens; the others are read again from the caches.
    """
    x, _x_block, w, w_block, w_row, w_col, s, s_out, s_in, s_rank, _bias, y, ranks, K, blocks, _part = (
        seg
    )
    rank = tile * BR + tl.arange(0, BR)
    block = tl.arange(0, L)
    lane = tl.arange(0, BK)
    rank_ok = rank < ranks
    block_ok = block < blocks
    at = w + (block.to(tl.int64)[:, None] * w_block + rank.to(tl.int64)[None, :] * w_row)
    ok = block_ok[:, None] & rank_ok[None, :]
    there = (lane < K)[None, None, :]
    first = tl.load(at[:, :, None] + lane[None, None, :] * w_col, mask=ok[:, :, None] & there, other=0.0)
    at_s = block[:, None, None] * s_out + block[None, :, None] * s_in + rank[None, None, :] * s_rank
    mix = tl.load(s + at_s, mask=block_ok[:, None, None] & ok[None, :, :], other=0.0).to(tl.float32)
    if WAIT:
        gdc_wait()
    for token in range(tokens):
        chunk = first
        sums = tl.zeros([L, BR, BK], tl.float32)
        square = tl.zeros([L, BK], tl.float32)
        for start in range(0, K, BK):
            cols = start + lane
            after = cols + BK
            there = (after < K)[None, None, :]
            following = at[:, :, None] + after[None, None, :] * w_col
            following = tl.load(following, mask=ok[:, :, None] & there, other=0.0)
            at_x = block[:, None] * K + cols[None, :]
            x_ok = block_ok[:, None] & (cols < K)[None, :]
            v = tl.load(x + token * x_token + at_x, mask=x_ok, other=0.0).to(tl.float32)
            if NORM:
                square += v * v
                v *= tl.load(gain + at_x, mask=x_ok, other=0.0).to(tl.float32)
            sums += chunk.to(tl.float32) * v[:, None, :]
            chunk = following
        mixed = tl.sum(mix * tl.sum(sums, 2)[None, :, :], 1)
        if NORM:
            mixed *= tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / (K * blocks) + eps)
        to = y + token * y_token + block[:, None] * ranks + rank[None, :]
        tl.store(to, mixed.to(y.dtype.element_ty), mask=ok)


@triton.jit
def run_segment(
    tile, seg, x_token, y_token, gain, eps, tokens,
    N: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, MIX: tl.constexpr,
    BIAS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One tile of a segment, stored; of MIX blocks that it mixes, if MIX."""
    if MIX > 0:
        mixed_segment(tile, seg, x_token, y_token, gain, eps, tokens, MIX, BR, BK, NORM, WAIT)
    else:
        first, second, out, ok = stage_rows(
            tile, seg, x_token, gain, eps, tokens, N, BR, BK, NORM, BIAS, WAIT
        )
        store_rows(seg[11], y_token, first, second, out, ok, tokens, N)


@triton.jit
def grouped_kernel(
    seg0, seg1, seg2, x_token0, x_token1, x_token2, y_token0, y_token1, y_token2,
    programs0, programs1, gain, eps, tokens,
    COUNT: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
    BR0: tl.constexpr, BK0: tl.constexpr, MIX0: tl.constexpr, BIAS0: tl.constexpr, NORM0: tl.constexpr,
    BR1: tl.constexpr, BK1: tl.constexpr, MIX1: tl.constexpr, BIAS1: tl.constexpr, NORM1: tl.constexpr,
    BR2: tl.constexpr, BK2: tl.constexpr, MIX2: tl.constexpr, BIAS2: tl.constexpr, NORM2: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to programs0 do the first, up to programs1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < programs0:
        run_segment(program, seg0, x_token0, y_token0, gain, eps, tokens,
                    N, BR0, BK0, NORM0, MIX0, BIAS0, PDL)  # fmt: skip
    if COUNT > 1:  # noqa: SIM102
        if (program >= programs0) & (program < programs1):
            run_segment(program - programs0, seg1, x_token1, y_token1, gain, eps, tokens,
                        N, BR1, BK1, NORM1, MIX1, BIAS1, PDL)  # fmt: skip
    if COUNT > 2:  # noqa: SIM102
        if program >= programs1:
            run_segment(program - programs1, seg2, x_token2, y_token2, gain, eps, tokens,
                        N, BR2, BK2, NORM2, MIX2, BIAS2, PDL)  # fmt: skip


@triton.jit
def dual_kernel(
    seg0, seg1, x_token0, x_token1, y_token, gain, eps, tokens,
    N: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr,
    BR: tl.constexpr, BK0: tl.constexpr, BIAS0: tl.constexpr, BK1: tl.constexpr, BIAS1: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    gate, gate2, out, ok = stage_rows(
        program, seg0, x_token0, gain, eps, tokens, N, BR, BK0, NORM, BIAS0, PDL
    )
    up, up2, out, ok = stage_rows(
        program, seg1, x_token1, gain, eps, tokens, N, BR, BK1, NORM, BIAS1, False
    )
    first = activate(gate, ACT) * up
    second = first
    if N == 2:
        second = activate(gate2, ACT) * up2
    store_rows(seg1[11], y_token, first, second, out, ok, tokens, N)


def grouped(
    segments: Sequence[Segment],
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    config: Sequence[dict[str, int]] | None = None,
) -> None:
    """`segments.grouped` in one launch.

    Args:
        segments: one to three, of 1 to 16 tokens, with columns of stride 1.
        config: BR, BK and num_warps of each segment in place of `tile_shape`'s; the launch has the
            most warps of any.
    """
    tokens, padded = _tokens(segments[0])
    chosen = [_tile(s, tokens, gain) for s in segments]
    tiles = [{**t, **(config[i] if config else {})} for i, t in enumerate(chosen)]
    programs = [_programs(s, t) for s, t in zip(segments, tiles, strict=True)]
    ends = [sum(programs[: i + 1]) for i in range(len(programs))]
    three = [(*segments, *segments[:1] * 2)[i] for i in range(3)]
    constants = {}
    for i, s in enumerate(three):
        tile = tiles[i] if i < len(tiles) else tiles[0]
        mix = 0 if s.mix is None else power_of_two(s.mix.shape[0])
        constants |= {f"BR{i}": tile["BR"], f"MIX{i}": mix, **_constants(s, tile, i)}
        constants[f"NORM{i}"] = norm_kind(s.x, s.w, gain)
    none = segments[0].w
    grouped_kernel[(ends[-1],)](
        *(_arguments(s) for s in three),
        *(s.x.stride(0) for s in three),
        *(s.y.stride(0) for s in three),
        *(ends[0], ends[1] if len(ends) > 1 else ends[0]),
        *(none if gain is None else gain, eps, tokens),
        COUNT=len(segments),
        N=padded,
        PDL=pdl,
        num_warps=max(t["num_warps"] for t in tiles),
        **constants,
        **({"launch_pdl": True} if pdl else {}),
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
    tokens, padded = _tokens(gate)
    first, second = _pair_tiles(gate, up, tokens, gain)
    rows = min(first["BR"], second["BR"])
    none = gate.w
    constants = {"BR": rows, **_constants(gate, first, 0), **_constants(up, second, 1)}
    constants |= {"num_warps": max(first["num_warps"], second["num_warps"]), **config}
    dual_kernel[(gate.w.shape[0] * -(-gate.w.shape[1] // constants["BR"]),)](
        *(_arguments(gate), _arguments(up)),
        *(gate.x.stride(0), up.x.stride(0), up.y.stride(0)),
        *(none if gain is None else gain, eps, tokens),
        N=padded,
        NORM=norm_kind(gate.x, gate.w, gain),
        PDL=pdl,
        ACT=activation,
        **constants,
        **({"launch_pdl": True} if pdl else {}),
    )


def _tokens(segment: Segment) -> tuple[int, int]:
    """Tokens of a launch, and the number that its kernel is made for."""
    tokens = segment.x.shape[0]
    if not 1 <= tokens <= 16:
        raise ValueError(f"grouped gemv: {tokens} tokens; it takes 1 to 16")
    return tokens, token_slots(tokens)


def _tile(segment: Segment, tokens: int, gain: Tensor | None) -> dict[str, int]:
    """Sizes as `tile_shape` has them; a mixing program has a tile of every block."""
    blocks, rows, width = segment.w.shape
    if segment.mix is not None:
        columns = min(power_of_two(width), max(2048 // power_of_two(blocks), 64))
        warps = 8 if gain is not None and blocks > 8 else 4  # four would spill
        return {"BR": min(power_of_two(rows), 4), "BK": columns, "num_warps": warps}
    sizes = {"size": segment.w.element_size(), "x_size": segment.x.element_size()}
    return tile_shape(rows, width, tokens, norm=norm_kind(segment.x, segment.w, gain), **sizes)


def _pair_tiles(gate: Segment, up: Segment, tokens: int, gain: Tensor | None) -> list[dict[str, int]]:
    """As `_tile`, of both sides of a pair: on the CUDA cores `pair_tile`'s, else four rows at most."""
    tiles = [_tile(segment, tokens, gain) for segment in (gate, up)]
    if tokens > 2:
        return tiles
    chosen = {} if gain is not None else pair_tile(max(gate.w.shape[2], up.w.shape[2]))
    rows = min(chosen.get("BR", 4), power_of_two(gate.w.shape[1]))
    return [{**tile, **chosen, "BR": rows} for tile in tiles]


def _programs(segment: Segment, tile: dict[str, int]) -> int:
    tiles = -(-segment.w.shape[1] // tile["BR"])
    return tiles if segment.mix is not None else segment.w.shape[0] * tiles


def _constants(segment: Segment, tile: dict[str, int], number: int) -> dict[str, Any]:
    return {f"BK{number}": tile["BK"], f"BIAS{number}": segment.bias is not None}


def _arguments(segment: Segment) -> tuple[Any, ...]:
    """The tuple that `stage_rows` takes."""
    x, w, mix, bias = segment.x, segment.w, segment.mix, segment.bias
    blocks, rows, width = w.shape
    return (
        *(x, 0 if shared_input(x, w) else width),
        *(w, w.stride(0), w.stride(1), w.stride(2)),
        *(w if mix is None else mix, *((0, 0, 0) if mix is None else mix.stride())),
        w if bias is None else bias,
        *(segment.y, rows, width, blocks, segment.part or rows),
    )
