"""Launches of decoding stages with plain weights: shapes in, grid and tile sizes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from blr.kernels.common.available import interpreted
from blr.kernels.common.launching import TritonKernel, run_kernel
from blr.kernels.decode.gemv.segments import USUAL, AnySegment, How, QuantizedSegment, Run, Segment

if TYPE_CHECKING:
    from blr.kernels.decode.quantized.launch import QuantizedStage, QuantizedTile

FEW = 64  # rows of a stage that would leave most of the GPU idle
TOKENS = 8  # of a launch at most
HELD = 64  # sums of all tokens that a thread has in registers
GATED = 512  # columns of a program of `gate`
NO_CONFIG: Mapping[str, int] = {}
Some = TypeVar("Some", Segment, QuantizedSegment, AnySegment)


class Stage(NamedTuple):
    """What kernels take of a `Segment`: pointers, strides and sizes, all in elements.

    x_token, y_token: from a token to the next one. x_block: from the input of a block to the next one's,
    0 where all share it. Any pointer stands for an absent tensor: it is never read.
    """

    x: Tensor
    x_token: int
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    w_col: int
    mix: object
    mix_out: int
    mix_in: int
    mix_rank: int
    bias: Tensor
    y: Tensor
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int


class Tile(NamedTuple):
    """What the code for a stage is specialized by: rows BR and columns BK of a program's tile,
    `norm_kind`, whether there is a bias, the power of two of blocks that it mixes or 0, and the tokens
    of the launch."""

    BR: int
    BK: int
    NORM: int = 0
    BIAS: bool = False
    MIX: int = 0
    TOKENS: int = 1


def tile_shape(
    rows: int, width: int, *, norm: int = 0, size: int = 2, x_size: int = 4
) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps: the best of those timed on an H200.

    Args:
        rows, width: of a block of weights of `size` bytes each. norm: as `norm_kind`, of the input,
            whose elements have `x_size` bytes: what every program reads of them weighs against few
            rows, most of all if it needs the whole row for its scale.
    """
    columns = power_of_two(width)
    best = (8, 512, 4)
    if norm == 2:
        best = (64, 256, 8)
    elif norm:
        best = (4, 512, 4)
    elif rows <= FEW and width > 2048:  # V of a correction: a program a row
        best = (1, 2048, 8)
    elif width > 4096:
        best = (4, 1024 if x_size == 4 else 2048, 8)
    elif width > 2048:
        best = (2, 1024, 4) if rows > 2048 else (2, 2048, 8)
    return {"BR": min(best[0], power_of_two(rows)), "BK": min(best[1], columns), "num_warps": best[2]}


def pair_tile(width: int) -> dict[str, int]:
    """Tiles of gate ⊙ up, whose programs take the same rows of both. {}: those of
    `tile_shape`.

    Chunks of 512 columns are best where they fit; a mostly empty last one costs as much as a full one.
    """
    if not 512 < width <= 2048:
        return {}
    fits = -(-width // 512) * 512 <= 1.1 * width
    return {"BR": 4, "BK": 512, "num_warps": 4} if fits else {"BR": 16, "BK": 128, "num_warps": 4}


def stage_tile(width: int) -> dict[str, int]:
    """Tiles where the two stages of one layer are all there is: smaller ones than between the other
    phases of a model, since nothing else hides how they start and end. {}: those of `tile_shape`."""
    if width <= 256:
        return {}
    rows, columns = (4, 512) if width <= 2048 else (1, 1024)
    return {"BR": rows, "BK": min(columns, power_of_two(width)), "num_warps": 4}


def rows_of(shape: dict[str, int], tokens: int) -> int:
    """BR of a shape for so many tokens: fewer rows, whose lanes share a row as those of one token do, so
    that sums have the same order."""
    rows, each = shape["BR"], shape["BK"] / (32 * shape["num_warps"])
    while tokens * rows * each > HELD and rows * each >= 16:
        rows //= 2
    return rows


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    part: int | None = None,
    pdl: bool = False,
) -> Tensor:
    """`Segment.product` of one stage of a layer, a new tensor of `dtype`.

    Args:
        x: [n, …]. w: [B, R, K], any strides; fastest with K of stride 1.
        pdl: launched while the kernel before it still runs (compute capability 9 and later): the
            weights must not be written by that kernel.
    """
    y = torch.empty(len(x), w.shape[0] * w.shape[1], dtype=dtype, device=x.device)
    s = Segment(x if x.stride(1) == 1 else x.contiguous(), w, y, bias, part=part)
    if len(x):
        grouped([s], How(pdl=pdl), stage_tile(w.shape[2]))
    return y


def stage(s: Segment) -> Stage:
    """What kernels take of a segment."""
    blocks, rows, width = s.shape
    x = s.x, s.x.stride(0), 0 if s.x.shape[1] == width else width
    w = s.w, s.w.stride(0), s.w.stride(1), s.w.stride(2)
    mix = s.w if s.mix is None else s.mix, *mix_strides(s.mix)
    results = s.w if s.bias is None else s.bias, s.y, s.y.stride(0)
    return Stage(*(*x, *w, *mix, *results, rows, width, blocks, s.part or rows))


def mix_strides(mix: Tensor | None) -> tuple[int, int, int]:
    """Of [B, B, R]; zeros where nothing is mixed."""
    return (0, 0, 0) if mix is None else (mix.stride(0), mix.stride(1), mix.stride(2))


def run_stages(
    rows: TritonKernel, pair: TritonKernel, stages: Sequence[Stage | QuantizedStage],
    tiles: Sequence[Tile | QuantizedTile], how: How, warps: int, registers: int = 0,
) -> None:  # fmt: skip
    """One to three stages by `rows`, a `grouped_kernel` of plain or of quantized weights, or gate and up
    by `pair`, a `dual_kernel`. registers: of a thread of `rows` at most, 0: as the compiler likes."""
    blocks = [1 if tile.MIX else s.blocks for s, tile in zip(stages, tiles, strict=True)]
    programs = [b * -(-s.rows // t.BR) for b, s, t in zip(blocks, stages, tiles, strict=True)]
    norm = (stages[0].x if how.gain is None else how.gain, how.eps)
    options: dict[str, object] = {"num_warps": warps, **launch_options(how.pdl)}
    if how.activation:
        options |= {"T0": tiles[0], "T1": tiles[1], "ACT": how.activation}
        run_kernel(pair, (programs[0],), *stages, *norm, **options)
        return
    ends = [*accumulate(programs)]
    given = (*three(stages), ends[0], ends[min(1, len(ends) - 1)], *norm)
    options |= {"COUNT": len(stages), "ADD": how.add, **numbered("T", tiles)}
    options |= {"maxnreg": registers} if registers and not interpreted() else {}
    run_kernel(rows, (ends[-1],), *given, **options)


def three(found: Sequence[object], other: object = None) -> list[object]:
    """`found`, at most three, and in the place of those missing `other` or the first."""
    return [*found, *[found[0] if other is None else other] * 3][:3]


def numbered(name: str, found: Sequence[object], other: object = None) -> dict[str, object]:
    """`three` by name: ``T0``, ``T1`` and ``T2`` of "T"."""
    return {f"{name}{n}": each for n, each in enumerate(three(found, other))}


def launch_options(pdl: bool) -> dict[str, bool]:
    """PDL of a kernel, and what its launch needs then."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def tokens_of(segments: Sequence[Some], most: int = 1) -> Iterator[list[Some]]:
    """Segments of up to `most` tokens after others: what they are where no more are multiplied."""
    for token in range(0, len(segments[0].x), most):
        yield [s.of_tokens(slice(token, token + most)) for s in segments]


def norm_kind(x: Tensor, width: int, gain: Tensor | None) -> int:
    """0 without a norm, 1 if every block of `width` columns takes all that the norm is over, else 2."""
    return 0 if gain is None else 1 if x.shape[1] == width else 2


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def grouped(
    segments: Sequence[Segment], how: How = USUAL, config: Mapping[str, int] = NO_CONFIG
) -> None:
    """`segments.grouped` in one launch.

    Args:
        segments: one to three, with columns of stride 1; of more than `TOKENS` tokens, or several that
            are mixed, several launches. Nothing is added to what is mixed.
        config: BR, BK and num_warps of every segment in place of `tile_shape`'s; the launch has the most
            warps of any.
    """
    from blr.kernels.decode.gemv.triton import dual_kernel, grouped_kernel

    tokens, most = len(segments[0].x), TOKENS if all(s.mix is None for s in segments) else 1
    if tokens > most:
        for some in tokens_of(segments, most):
            grouped(some, how, config)
        return
    gain, paired = how.gain, bool(how.activation)
    chosen = _pair_shapes(segments, gain) if paired else [segment_shape(s, gain) for s in segments]
    shapes = [{**shape, **config} for shape in chosen]
    warps = max(shape["num_warps"] for shape in shapes)
    heights = [rows_of({**shape, "num_warps": warps}, tokens) for shape in shapes]
    heights = [min(heights)] * 2 if paired else heights
    sizes = zip(segments, heights, shapes, strict=True)
    tiles = [_tile(s, rows, shape["BK"], gain) for s, rows, shape in sizes]
    run_stages(grouped_kernel, dual_kernel, [stage(s) for s in segments], tiles, how, warps)


def gate(both: Tensor, y: Tensor, *, activation: str, pdl: bool = False) -> None:
    """``y = act(both[:, :f]) ⊙ both[:, f:]`` of both [n, 2 f] and y [n, f], in float32, rounded once."""
    from blr.kernels.decode.gemv.triton import gate_kernel

    run_kernel(
        gate_kernel,
        (len(y), -(-y.shape[1] // GATED)),
        *(both, both.stride(0), y, y.stride(0), y.shape[1]),
        **{"BK": GATED, "ACT": activation, "num_warps": 4},
        **launch_options(pdl),
    )


def side_by_side(segments: Sequence[AnySegment], how: How) -> tuple[list[AnySegment], Run]:
    """Gate and up into rows of one matrix, and what makes their gated product of that."""
    y = segments[1].y
    both = torch.empty(len(y), 2 * y.shape[1], dtype=torch.float32, device=y.device)
    halves = [replace(s, y=part) for s, part in zip(segments, both.chunk(2, 1), strict=True)]
    return halves, partial(gate, both, y, activation=how.activation, pdl=how.pdl)


def segment_shape(segment: Segment, gain: Tensor | None) -> dict[str, int]:
    """Sizes as `tile_shape` has them; a mixing program has a tile of every block."""
    blocks, rows, width = segment.shape
    if segment.mix is not None:
        columns = min(power_of_two(width), max(2048 // power_of_two(blocks), 64))
        warps = 8 if gain is not None and blocks > 8 else 4  # four would spill
        return {"BR": min(power_of_two(rows), 4), "BK": columns, "num_warps": warps}
    sizes = {"size": segment.w.element_size(), "x_size": segment.x.element_size()}
    return tile_shape(rows, width, norm=norm_kind(segment.x, width, gain), **sizes)


def _pair_shapes(pair: Sequence[Segment], gain: Tensor | None) -> list[dict[str, int]]:
    """As `segment_shape`, of both of a pair: `pair_tile`'s, else four rows at most."""
    shapes = [segment_shape(segment, gain) for segment in pair]
    chosen = {} if gain is not None else pair_tile(max(s.shape[2] for s in pair))
    rows = min(chosen.get("BR", 4), power_of_two(pair[0].shape[1]))
    return [{**shape, **chosen, "BR": rows} for shape in shapes]


def _tile(s: Segment, rows: int, columns: int, gain: Tensor | None) -> Tile:
    mix = 0 if s.mix is None else power_of_two(s.mix.shape[0])
    return Tile(rows, columns, norm_kind(s.x, s.shape[2], gain), s.bias is not None, mix, len(s.x))
