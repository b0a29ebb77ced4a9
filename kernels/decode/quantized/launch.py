"""Launches decoding stages with quantized weights: shapes in, grid and tile sizes out.

Of several tokens one launch each: many are for `kernels/decode/skinny`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.available import interpreted
from blr.kernels.decode.gemv.launch import (
    NO_CONFIG,
    mix_strides,
    norm_kind,
    power_of_two,
    run_stages,
    tokens_of,
)
from blr.kernels.decode.gemv.segments import USUAL, How, QuantizedSegment
from blr.kernels.decode.quantized.formats import GROUP, Form, form_of, packed_width

# Bits -> quads of 16 bytes of a row that one chunk has at most.
CHUNK = {2: 64, 3: 64, 4: 128, 8: 256}
DEEPEST, NARROW = 8, 2  # rows of a thread at most; of less than a chunk
SHALLOW = 4  # of three bits at most: words of two planes need twice the registers
PROGRAMS = 396  # that a launch has at least, if it can: three for each multiprocessor of an H200
REGISTERS = 112  # of a thread at most in four bits: four programs of four warps a multiprocessor


class QuantizedStage(NamedTuple):
    """What kernels take of a `QuantizedSegment`, as `gemv.launch.Stage`; w and its strides count words
    of 4 bytes, w_row units of them. z, u…: of a correction."""

    x: Tensor
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    scale: object
    scale_block: int
    scale_row: int
    mix: object
    mix_out: int
    mix_in: int
    mix_rank: int
    bias: Tensor
    y: Tensor
    rows: int
    K: int
    blocks: int
    part: int
    z: Tensor
    u: object
    u_row: int
    u_scale: object
    u_scale_row: int
    u_part: int
    ranks: int


class QuantizedTile(NamedTuple):
    """What the code for a stage is specialized by: the `formats.Form` of its weights, rows BR and quads
    BQ of a program's tile, its rows T that lie side by side, whether a row has ONE chunk, by what UNIT
    of words rows are counted; NORM, BIAS and MIX as of `gemv.launch.Tile`; the
    power of two RANKS of a correction or 0, U_GROUP of its levels or 0; products of BYTES: 0 in float32,
    1 by the GPU's instruction for four, 2 by what that computes. FULL: the tile has no row, quad or
    column that is not there. EXACT: offsets are taken from each level, not from sums."""

    BITS: int
    GROUP: int
    FIELDS: int
    WORDS: int
    STEP: int
    COLUMNS: int
    CURVED: bool
    BR: int
    BQ: int
    T: int
    ONE: bool
    UNIT: int = 4
    NORM: int = 0
    BIAS: bool = False
    MIX: int = 0
    RANKS: int = 0
    U_GROUP: int = 0
    BYTES: int = 0
    FULL: bool = False
    EXACT: bool = False


def tile_shape(
    rows: int, width: int, bits: int, total: int | None = None, group: int = GROUP
) -> dict[str, int]:
    """Rows BR and quads BQ of a program's tile, and its warps.

    A thread that has several rows makes their inputs once; but the programs must fill the GPU: on an
    H200 the stages of an 8B model were fastest with the most rows that leave `PROGRAMS` programs, and
    with `DEEPEST` where rows of 4 and 8 bits have several chunks.

    Args:
        rows, width: of a block of weights. total: rows of the whole launch (default: `rows`).
    """
    quads = max(power_of_two(form_of(bits, group).quads(width)), 4)
    chunk = min(quads, CHUNK[bits])
    warps = max(chunk // 32, 4)
    beside = max(32 * warps // chunk, 1)
    deep = max((total or rows) // (PROGRAMS * beside), 1)
    deep = min(power_of_two(deep + 1) // 2, DEEPEST)  # the power of two at or below
    if bits == 3:
        deep = min(deep, SHALLOW)
    elif bits > 3 and quads > chunk:
        deep = DEEPEST
    elif quads < CHUNK[bits]:
        deep = min(deep, NARROW)
    bytewise = bits == 4 and quads >= CHUNK[bits]
    if bytewise and quads > chunk:
        chunk, deep = chunk // 2, DEEPEST
    shape = {"BR": min(deep * beside, power_of_two(rows)), "BQ": chunk, "num_warps": warps}
    return {**shape, "BYTES": 1} if bytewise else shape


def mixed_shape(blocks: int, ranks: int, width: int, bits: int, group: int = GROUP) -> dict[str, int]:
    """The same for a stage that mixes its blocks: BR ranks of every block, BQ quads of each."""
    across = power_of_two(blocks)
    quads = max(power_of_two(form_of(bits, group).quads(width)), 4)
    chunk = min(quads, max(128 // across, 8))
    warps = min(max(across * chunk // 32, 1), 8)
    return {"BR": min(power_of_two(ranks), 4), "BQ": chunk, "num_warps": warps}


def stage(s: QuantizedSegment) -> QuantizedStage:
    """What kernels take of a segment. Raises ValueError as `as_words`."""
    words = as_words(s.packed, s.bits, s.K, s.group)
    blocks, rows, _ = words.shape
    z = u = by = s.x
    sizes = 0, 0, 0, 0  # steps of u and its scales, rows of a block, ranks
    if s.correction is not None:
        z, narrow = s.correction.first.y, s.correction.u
        u, by = narrow.levels, narrow.levels if narrow.scale is None else narrow.scale
        sizes = u.stride(1), by.stride(1), u.shape[1], u.shape[2]
    w = words, words.stride(0), words.stride(1) // row_unit(words)
    scale = s.scale, s.scale.stride(0), s.scale.stride(1)
    mix = s.x if s.mix is None else s.mix, *mix_strides(s.mix)
    results = s.x if s.bias is None else s.bias, s.y, rows, s.K, blocks, s.part or rows
    corrected = z, u, sizes[0], by, sizes[1], sizes[2], sizes[3]
    x = s.x, 0 if s.x.shape[1] == s.K else s.K
    return QuantizedStage(*(*x, *w, *scale, *mix, *results, *corrected))


def row_unit(words: Tensor) -> int:
    """Words of which rows of `words` [B, R, …] are a multiple apart: 4 where the loads of 16 bytes that
    begin with them are aligned, else 1."""
    aligned = words.data_ptr() % 16 == 0 and words.stride(0) % 4 == 0 and words.stride(1) % 4 == 0
    return 4 if aligned else 1


def quantized_tile(s: QuantizedSegment, shape: dict[str, int], gain: Tensor | None) -> QuantizedTile:
    """The tile of a shape that is `complete`."""
    form, words = form_of(s.bits, s.group, s.curved), as_words(s.packed, s.bits, s.K, s.group)
    u = None if s.correction is None else s.correction.u
    return QuantizedTile(
        *form,
        *(shape["BR"], shape["BQ"], shape["T"]),
        ONE=form.quads(s.K) <= shape["BQ"],
        UNIT=row_unit(words),
        NORM=norm_kind(s.x, s.K, gain),
        BIAS=s.bias is not None,
        MIX=0 if s.mix is None else power_of_two(len(s.mix)),
        RANKS=0 if u is None else power_of_two(u.shape[2]),
        U_GROUP=0 if u is None or u.scale is None else u.group,
        BYTES=products_of(s, bool(shape.get("BYTES", 0))),
        FULL=_full(s, form, shape),
        EXACT=takes_offsets(form, s.scale.dtype),
    )


def takes_offsets(form: Form, dtype: torch.dtype) -> bool:
    """`QuantizedTile.EXACT` of scales in `dtype`: where the sums are asked to be those of float32."""
    return form.CURVED or (form.BITS < 8 and dtype == torch.float32)


def _full(s: QuantizedSegment, form: Form, shape: dict[str, int]) -> bool:
    """Whether tiles of a shape are full: then nothing that is loaded needs a mask."""
    rows = s.packed.shape[1] % shape["BR"] == 0 and s.mix is None
    return rows and form.quads(s.K) == shape["BQ"] and s.K % s.group == 0


def products_of(s: QuantizedSegment, wanted: bool) -> int:
    """`QuantizedTile.BYTES`: of bytes where that is wanted and no less exact than the model's dtype."""
    corrected = s.correction is not None or s.mix is not None
    if not wanted or corrected or s.bits != 4 or s.scale.dtype.itemsize > 2:
        return 0
    return 2 if interpreted() else 1


def complete(tile: dict[str, int], num_warps: int) -> dict[str, int]:
    """A tile with T, the rows that lie side by side in the lanes of `num_warps`, and no fewer rows."""
    beside = max(32 * num_warps // tile["BQ"], 1)
    return {**tile, "BR": max(tile["BR"], beside), "T": beside, "num_warps": num_warps}


def as_words(packed: Tensor, bits: int, K: int, group: int = GROUP) -> Tensor:
    """Packed bytes as int32 [B, R, bytes/4], without a copy where rows allow it.

    Raises ValueError for a row that is not `packed_width(K, bits, group)` bytes long.
    """
    expected = packed_width(K, bits, group)
    if packed.shape[-1] != expected:
        raise ValueError(
            f"packed rows of {packed.shape[-1]} bytes: expected {expected} for {K} columns of int{bits}"
        )
    steps = (*packed.stride()[:-1], packed.storage_offset())
    if packed.stride(-1) != 1 or any(step % 4 for step in steps):
        packed = packed.contiguous()
    return packed.view(torch.int32)


def grouped(
    segments: Sequence[QuantizedSegment], how: How = USUAL, config: Mapping[str, int] = NO_CONFIG
) -> None:
    """`segments.grouped` in one launch a token: of one to three segments of one format, with columns of
    stride 1. config: as of `gemv.launch.grouped`, with BQ."""
    from blr.kernels.decode.quantized.triton import dual_kernel, grouped_kernel

    total = sum(s.packed.shape[0] * s.packed.shape[1] for s in segments)
    if how.activation:
        widest = max(segments, key=lambda s: s.K)
        shapes = [{**_segment_shape(widest, total), "BYTES": 0, **config}] * 2
    else:
        shapes = [{**_segment_shape(s, total), **config} for s in segments]
    warps = max(shape["num_warps"] for shape in shapes)
    sizes = zip(segments, shapes, strict=True)
    tiles = [quantized_tile(s, complete(shape, warps), how.gain) for s, shape in sizes]
    most = REGISTERS if warps == 4 and segments[0].bits == 4 else 0
    for token in tokens_of(segments):
        run_stages(grouped_kernel, dual_kernel, [stage(s) for s in token], tiles, how, warps, most)


def _segment_shape(s: QuantizedSegment, total: int) -> dict[str, int]:
    """Sizes of `tile_shape` in a launch of `total` rows; a mixing program has a tile of every block."""
    blocks, rows, _ = s.packed.shape
    if s.mix is not None:
        return mixed_shape(blocks, rows, s.K, s.bits, s.group)
    return tile_shape(rows, s.K, s.bits, total, s.group)
