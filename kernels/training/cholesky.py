"""Launches factorizations of batches of symmetric positive definite matrices and solutions with them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.launching import launch

TILE = 64  # columns of a step
ROWS = 32  # right sides of a program
WARPS = 4  # of a program
# Three products of TF32 for one of float32: as exact (errors 1.6e-5 where the library has 2.3e-5, of
# systems of condition 1e5), and twice as fast as the CUDA cores
PRECISION = "tf32x3"


def is_tiled(matrices: Tensor) -> bool:
    """Whether `factored` takes `matrices`: batches of float32 where kernels run."""
    return matrices.dim() == 3 and matrices.dtype == torch.float32 and kernels_on(matrices.device)


@dataclass(frozen=True)
class Factored:
    """Lower factors `lower` [g, n, n] (above their diagonal tiles lies what the matrices had there) and
    the inverses [g, t, TILE, TILE] of their diagonal tiles, the identity beyond the edge."""

    lower: Tensor
    inverses: Tensor

    def unsound(self) -> list[int]:
        """Numbers of the matrices that were not positive definite; waits for the GPU."""
        bad = ~self.inverses.isfinite().flatten(1).all(1)
        return bad.nonzero()[:, 0].tolist()

    def solve(self, right: Tensor) -> Tensor:
        """X [g, m, n] with ``X A = B`` for B [g, m, n]."""
        from blr.kernels.training.cholesky_triton import solve_kernel

        solved = right.clone(memory_format=torch.contiguous_format)
        groups, m, n = solved.shape
        if not solved.numel():
            return solved
        strides = solved.stride(0), self.lower.stride(0), *self.inverses.stride()[:2]
        given = (solved, self.lower, self.inverses, m, n, *strides)
        for back in (False, True):
            constants = {"BACK": back, "ROWS": ROWS, "TILE": TILE, "PRECISION": PRECISION}
            launch(solve_kernel, (-(-m // ROWS), groups), given, constants, num_warps=WARPS)
        return solved


def factored(matrices: Tensor) -> Factored:
    """Of symmetric matrices [g, n, n] in float32, of which what lies above the diagonal tiles is not
    read; NaN in the factors of one that is not positive definite."""
    lower = matrices.clone(memory_format=torch.contiguous_format)
    groups, n, _ = lower.shape
    tiles = -(-n // TILE)
    inverses = lower.new_empty(groups, tiles, TILE, TILE)
    for tile in range(tiles if groups else 0):
        _step(lower, inverses[:, tile], tile * TILE, tiles - tile - 1)
    return Factored(lower, inverses)


def _step(lower: Tensor, inverses: Tensor, first: int, below: int) -> None:
    """Factor the columns of the tile at `first`, and take them from the tiles behind it."""
    from blr.kernels.training.cholesky_triton import diagonal_kernel, panel_kernel, update_kernel

    groups, n, _ = lower.shape
    given = (lower, inverses, n, first, lower.stride(0), inverses.stride(0))
    launch(diagonal_kernel, (groups,), given, {"TILE": TILE}, num_warps=WARPS)
    if below:
        constants: dict[str, object] = {"TILE": TILE, "PRECISION": PRECISION}
        launch(panel_kernel, (below, groups), given, constants, num_warps=WARPS)
        behind = (lower, n, first, lower.stride(0))
        launch(update_kernel, (below, below, groups), behind, constants, num_warps=WARPS)
