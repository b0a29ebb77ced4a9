"""The relative distance of rows of states and its gradient: kernels that read both states once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blr.kernels.common.launching import run_kernel
from blr.kernels.training.losses import LEAST

WIDEST = 2048  # columns of a block at most
TILE = 4096  # numbers of a program's block
WARPS = 8


@triton.jit
def distance_kernel(
    mine, wanted, found, size, n, width, least, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """found [n] = ‖h − h'‖² / ‖h'‖² and size [n] = ‖h'‖², at least `least`, in float32, for states
    [n, width] of contiguous rows. Grid (⌈n / ROWS⌉,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    apart = tl.zeros((ROWS, BLOCK), tl.float32)
    whole = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        there = (row < n)[:, None] & (start + lane < width)
        at = row[:, None] * width + start + lane
        h = tl.load(mine + at, mask=there, other=0.0).to(tl.float32)
        t = tl.load(wanted + at, mask=there, other=0.0).to(tl.float32)
        apart += (h - t) * (h - t)
        whole += t * t
    length = tl.maximum(tl.sum(whole, 1), least)
    tl.store(found + row, tl.sum(apart, 1) / length, mask=row < n)
    tl.store(size + row, length, mask=row < n)


@triton.jit
def distance_back_kernel(
    mine, wanted, size, g, made, n, width, g_row, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """made [n, width] = 2 g (h − h') / size, for states [n, width] of contiguous rows and gradients
    g [n] that lie `g_row` apart. Grid (⌈n / ROWS⌉, ⌈width / BLOCK⌉)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < n)[:, None] & (lane < width)
    at = row[:, None] * width + lane
    by = 2.0 * tl.load(g + row * g_row, mask=row < n, other=0.0)
    by = by / tl.load(size + row, mask=row < n, other=1.0)
    h = tl.load(mine + at, mask=there, other=0.0).to(tl.float32)
    t = tl.load(wanted + at, mask=there, other=0.0).to(tl.float32)
    tl.store(made + at, (by[:, None] * (h - t)).to(made.dtype.element_ty), mask=there)


def distances(mine: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """As of `losses.distances`; states [..., d] of whatever two dtypes."""
    mine, wanted = mine.contiguous(), wanted.contiguous()
    found, size = torch.empty((2, *mine.shape[:-1]), dtype=torch.float32, device=mine.device)
    n, width, blocks = found.numel(), mine.shape[-1], _blocks(mine)
    if n:
        grid = (-(-n // blocks["ROWS"]),)
        given = (mine, wanted, found, size, n, width, LEAST)
        run_kernel(distance_kernel, grid, *given, **blocks, num_warps=WARPS)
    return found, size


def distances_back(mine: Tensor, wanted: Tensor, size: Tensor, g: Tensor) -> Tensor:
    """As of `losses.distances_back`."""
    mine, wanted, flat = mine.contiguous(), wanted.contiguous(), g.reshape(-1)
    made = torch.empty_like(mine)
    n, width, blocks = size.numel(), mine.shape[-1], _blocks(mine)
    if made.numel():
        grid = (-(-n // blocks["ROWS"]), -(-width // blocks["BLOCK"]))
        given = (mine, wanted, size, flat, made, n, width, flat.stride(0))
        run_kernel(distance_back_kernel, grid, *given, **blocks, num_warps=WARPS)
    return made


def _blocks(mine: Tensor) -> dict[str, int]:
    """Rows and columns of a program's block."""
    block = min(1 << max(mine.shape[-1] - 1, 0).bit_length(), WIDEST)
    return {"ROWS": max(TILE // block, 1), "BLOCK": block}
