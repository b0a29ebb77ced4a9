"""Weights in few bits as plain numbers, by one kernel at about the memory's speed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.quantized.formats import PLANES, grid_of
from blr.kernels.decode.quantized.plain import level_of

ROWS = 16  # of a program, which has one group of each


@triton.jit
def group_numbers(words, word_row, scale, scale_row, row, there, group, BITS: tl.constexpr,
                  GROUP: tl.constexpr, LOW: tl.constexpr, MIDDLE: tl.constexpr,
                  CURVED: tl.constexpr):  # fmt: skip
    """The numbers [BR, GROUP] in float32 of one group of the rows `row` that are `there`: levels times
    scales. LOW: bits of the lowest plane."""
    factor = tl.load(scale + row * scale_row + group, mask=there, other=0.0).to(tl.float32)
    at = words + row[:, None] * word_row + group * (GROUP * BITS // 32)
    inside = tl.arange(0, GROUP)[None, :]
    number = level_of(at, inside, there[:, None], BITS, GROUP, LOW, MIDDLE, CURVED)
    return number * factor[:, None]


@triton.jit
def dequantize_kernel(
    words, word_row, scale, scale_row, y, y_row, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, MIDDLE: tl.constexpr,
    CURVED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y [rows, K] of packed words, rounded once. A program owns BR rows of one group."""
    group = tl.program_id(1)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    there = row < rows
    held = row.to(tl.int64)
    found = group_numbers(words, word_row, scale, scale_row, held, there, group, BITS, GROUP, LOW,
                          MIDDLE, CURVED)  # fmt: skip
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    found = found.to(y.dtype.element_ty)
    tl.store(y + held[:, None] * y_row + column, found, mask=there[:, None] & (column < K))


def dequantize(
    packed: Tensor, scale: Tensor, bits: int, K: int, dtype: torch.dtype, group: int, curved: bool = True
) -> Tensor:
    """`blr.kernels.decode.quantized.reference.dequantize` in one launch: [..., R, K] in `dtype`.

    Args:
        packed: [..., R, bytes], rows of stride 1. scale: [..., R, groups], any float dtype.
    """
    shape, grid = (*packed.shape[:-1], K), grid_of(bits, curved)
    words = packed.reshape(-1, packed.shape[-1]).view(torch.int32)
    scale = scale.reshape(-1, scale.shape[-1])
    y = torch.empty(len(words), K, dtype=dtype, device=packed.device)
    constants = {"BITS": bits, "GROUP": group, "LOW": PLANES[bits][0], "MIDDLE": grid.offset}
    launch(
        dequantize_kernel,
        (-(-len(words) // ROWS), -(-K // group)),
        (words, words.stride(0), scale, scale.stride(0), y, y.stride(0), len(words), K),
        {**constants, "CURVED": grid.curve != 0, "BR": ROWS},
        num_warps=4,
    )
    return y.view(shape)
