"""Launches one decoding stage: shapes in, grid and tile sizes out."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.launching import TritonKernel, run_kernel
from blr.kernels.decode.gemv.segments import Segment, Stage, shared_input

FEW = 64  # rows of a stage that would leave most of the GPU idle
TOKENS = 8  # of a launch at most
HELD = 64  # sums of all tokens that a thread has in registers


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
    **config: int,
) -> Tensor:
    """`reference.gemv` of one stage of a layer, a new tensor of `dtype`.

    Args:
        x: [n, …]. w: [B, R, K], any strides; fastest with K of stride 1.
        pdl: launched while the kernel before it still runs (compute capability 9 and later): the
            weights must not be written by that kernel.
        config: of `grouped`, in place of `stage_tile`'s.
    """
    from blr.kernels.decode.gemv.grouped import grouped

    y = torch.empty(len(x), w.shape[0] * w.shape[1], dtype=dtype, device=x.device)
    s = Segment(x if x.stride(1) == 1 else x.contiguous(), w, y, bias, part=part)
    if len(x):
        grouped([s], pdl=pdl, config=[{**stage_tile(w.shape[2]), **config}])
    return y


def stage(s: Segment) -> Stage:
    """What kernels take of a segment."""
    blocks, rows, width = s.w.shape
    w_block, w_row, w_col = s.w.stride()
    mix_out, mix_in, mix_rank = mix_strides(s.mix)
    return Stage(
        x=s.x,
        x_token=s.x.stride(0),
        x_block=0 if shared_input(s.x, s.w) else width,
        w=s.w,
        w_block=w_block,
        w_row=w_row,
        w_col=w_col,
        mix=s.w if s.mix is None else s.mix,
        mix_out=mix_out,
        mix_in=mix_in,
        mix_rank=mix_rank,
        bias=s.w if s.bias is None else s.bias,
        y=s.y,
        y_token=s.y.stride(0),
        rows=rows,
        K=width,
        blocks=blocks,
        part=s.part or rows,
    )


def mix_strides(mix: Tensor | None) -> tuple[int, ...]:
    """Of [B, B, R]; zeros where nothing is mixed."""
    return (0, 0, 0) if mix is None else mix.stride()


def run_grouped(
    kernel: TritonKernel,
    stages: list[Any],
    tiles: list[Any],
    *,
    gain: Tensor | None,
    eps: float,
    **constants: object,
) -> None:
    """One to three stages by `kernel`, a `grouped_kernel` of plain or of quantized weights."""
    blocks = [1 if tile.MIX else s.blocks for s, tile in zip(stages, tiles, strict=True)]
    programs = [b * -(-s.rows // t.BR) for b, s, t in zip(blocks, stages, tiles, strict=True)]
    ends = [*accumulate(programs)]
    first, second, third = ((*tiles, *tiles[:1] * 2)[i] for i in range(3))
    run_kernel(
        kernel,
        (ends[-1],),
        *(*stages, *stages[:1] * 2)[:3],
        *(ends[0], ends[min(1, len(ends) - 1)]),
        *(stages[0].x if gain is None else gain, eps),
        COUNT=len(stages),
        **{"T0": first, "T1": second, "T2": third},
        **constants,
    )


def launch_options(pdl: bool) -> dict[str, bool]:
    """PDL of a kernel, and what its launch needs then."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def tokens_of(segments: Sequence[Any], most: int = 1) -> Iterator[list[Any]]:
    """Segments of up to `most` tokens after others: what they are where no more are multiplied."""
    for token in range(0, len(segments[0].x), most):
        yield [s.of_tokens(slice(token, token + most)) for s in segments]


def norm_kind(x: Tensor, width: int, gain: Tensor | None) -> int:
    """0 without a norm, 1 if every block of `width` columns takes all that the norm is over, else 2."""
    return 0 if gain is None else 1 if x.shape[1] == width else 2


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()
