"""Launches one decoding stage with quantized weights: shapes in, grid and tile sizes out.

Of several tokens one launch each: many are for `kernels/decode/skinny`.
"""

from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import interpreted
from blr.kernels.decode.gemv.launch import mix_strides, norm_kind, power_of_two
from blr.kernels.decode.quantized.formats import GROUP, Form, form_of, packed_width
from blr.kernels.decode.quantized.segments import (
    QuantizedSegment,
    QuantizedStage,
    QuantizedTile,
)

# Bits -> quads of 16 bytes of a row that one chunk has at most.
CHUNK = {2: 64, 3: 64, 4: 128, 8: 256}
BYTES = (4,)  # bits whose long rows are multiplied four bytes an instruction, for one token
DEEPEST, NARROW = 8, 2  # rows of a thread at most; of less than a chunk
SHALLOW = 4  # of three bits at most: words of two planes need twice the registers
PROGRAMS = 396  # that a launch has at least, if it can: three for each multiprocessor of an H200


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
    bytewise = bits in BYTES and quads >= CHUNK[bits]
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
    mix_out, mix_in, mix_rank = mix_strides(s.mix)
    return QuantizedStage(
        x=s.x,
        x_block=0 if s.x.shape[1] == s.K else s.K,
        w=words,
        w_block=words.stride(0),
        w_row=words.stride(1) // row_unit(words),
        scale=s.scale,
        scale_block=s.scale.stride(0),
        scale_row=s.scale.stride(1),
        mix=s.x if s.mix is None else s.mix,
        mix_out=mix_out,
        mix_in=mix_in,
        mix_rank=mix_rank,
        bias=s.x if s.bias is None else s.bias,
        y=s.y,
        rows=rows,
        K=s.K,
        blocks=blocks,
        part=s.part or rows,
        **_correction(s),
    )


def _correction(s: QuantizedSegment) -> dict[str, Any]:
    if s.correction is None:
        none = dict.fromkeys(("u_row", "u_scale_row", "u_part", "ranks"), 0)
        return {"z": s.x, "u": s.x, "u_scale": s.x, **none}
    z, u = s.correction.first.y, s.correction.u
    scale = u.levels if u.scale is None else u.scale
    return {
        "z": z,
        "u": u.levels,
        "u_row": u.levels.stride(1),
        "u_scale": scale,
        "u_scale_row": scale.stride(1),
        "u_part": u.shape[1],
        "ranks": u.shape[2],
    }


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
    )


def _full(s: QuantizedSegment, form: Form, shape: dict[str, int]) -> bool:
    """Whether tiles of a shape are full: then nothing that is loaded needs a mask."""
    rows = s.packed.shape[1] % shape["BR"] == 0 and s.mix is None
    return rows and form.quads(s.K) == shape["BQ"] and s.K % s.group == 0


def products_of(s: QuantizedSegment, wanted: bool) -> int:
    """`QuantizedTile.BYTES`: of bytes where that is wanted and no less exact than the model's dtype."""
    corrected = s.correction is not None or s.mix is not None
    if not wanted or corrected or s.bits == 3 or s.scale.dtype.itemsize > 2:
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
