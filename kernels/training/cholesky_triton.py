"""Batches of symmetric positive definite matrices factored and solved with, tile by tile.

The libraries' batches take thousands of small launches for a matrix of 1568 rows; here a step is one
tile of the diagonal of all matrices, its panel, and what lies behind it (right-looking, Golub and Van
Loan, "Matrix Computations", section 4.2). A program has a tile of one matrix: results do not depend on
how many matrices are taken together.
"""

import triton
import triton.language as tl


@triton.jit
def diagonal_kernel(a, inverses, n, first, a_batch, inverse_batch, TILE: tl.constexpr):
    """Cholesky factor L of the tile of `a` [g, n, n] at `first`, in its place (zeros above), and L⁻¹
    [g, TILE, TILE] in `inverses`; beyond the edge the identity, NaN where there is none. Grid (g,)."""
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    at = a + batch * a_batch + (first + i).to(tl.int64) * n + first + j
    there = (first + i < n) & (first + j < n)
    eye = tl.where(i == j, 1.0, 0.0)
    left = tl.load(at, mask=there, other=0.0)
    left = tl.where(there, left, eye)
    inverse = eye
    for k in range(0, TILE):
        column = tl.sum(tl.where(j == k, left, 0.0), 1)[:, None]  # [TILE, 1]
        row = tl.sum(tl.where(i == k, left, 0.0), 0)[None, :]  # the same numbers, lying
        pivot = tl.sqrt(tl.sum(tl.where(i == k, column, 0.0)))
        column = tl.where(i >= k, column / pivot, 0.0)
        row = tl.where(j > k, row / pivot, 0.0)
        left = tl.where(j == k, column, left - column * row)
        solved = tl.sum(tl.where(i == k, inverse, 0.0), 0)[None, :] / pivot
        inverse = tl.where(i == k, solved, inverse - tl.where(i > k, column, 0.0) * solved)
    tl.store(at, tl.where(i >= j, left, 0.0), mask=there)
    tl.store(inverses + batch * inverse_batch + i * TILE + j, inverse)


@triton.jit
def panel_kernel(
    a, inverses, n, first, a_batch, inverse_batch, TILE: tl.constexpr, PRECISION: tl.constexpr
):
    """The tiles of `a` below the one at `first`, A ← A L⁻ᵀ. Grid (tiles below, g)."""
    batch = tl.program_id(1).to(tl.int64)
    rows = first + TILE + tl.program_id(0) * TILE + tl.arange(0, TILE)
    lane = tl.arange(0, TILE)
    part = tl.arange(0, TILE // 2)
    a += batch * a_batch + rows.to(tl.int64)[:, None] * n + first
    turned = inverses + batch * inverse_batch + lane[None, :] * TILE
    there = (rows < n)[:, None]
    solved = tl.zeros([TILE, TILE], tl.float32)
    for half in range(2):  # as much as registers hold
        k = half * (TILE // 2) + part
        below = tl.load(a + k[None, :], mask=there, other=0.0)
        solved = tl.dot(below, tl.load(turned + k[:, None]), solved, input_precision=PRECISION)
    tl.debug_barrier()  # all of the tile is read before any of it is written
    tl.store(a + lane[None, :], solved, mask=there)


@triton.jit
def update_kernel(a, n, first, a_batch, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """The tiles of `a` behind the one at `first`, on and below the diagonal, A ← A − P Pᵀ with the panel
    P below it. Grid (tiles behind, tiles behind, g)."""
    batch = tl.program_id(2).to(tl.int64)
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    if tile_n <= tile_m:
        lane = tl.arange(0, TILE)
        part = tl.arange(0, TILE // 2)
        rows = first + TILE + tile_m * TILE + lane
        columns = first + TILE + tile_n * TILE + lane
        a += batch * a_batch
        high = a + rows.to(tl.int64)[:, None] * n
        wide = a + columns.to(tl.int64)[None, :] * n
        taken = tl.zeros([TILE, TILE], tl.float32)
        for half in range(2):  # as much as registers hold
            k = first + half * (TILE // 2) + part
            left = tl.load(high + k[None, :], mask=(rows < n)[:, None], other=0.0)
            right = tl.load(wide + k[:, None], mask=(columns < n)[None, :], other=0.0)
            taken = tl.dot(left, right, taken, input_precision=PRECISION)
        at = high + columns[None, :]
        there = (rows < n)[:, None] & (columns < n)[None, :]
        tl.store(at, tl.load(at, mask=there, other=0.0) - taken, mask=there)


@triton.jit
def solve_kernel(
    y, lower, inverses, m, n, y_batch, lower_batch, inverse_batch, inverse_tile,
    BACK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y ← Y L⁻ᵀ, or with BACK Y ← Y L⁻¹, of the rows of `y` [g, m, n]. Grid (row tiles, g).

    A program takes its rows through all tiles of columns: of what it has stored it reads its own alone.
    """
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, TILE)
    y += batch * y_batch + rows.to(tl.int64)[:, None] * n
    lower += batch * lower_batch
    inverses += batch * inverse_batch
    inside = (rows < m)[:, None]
    tiles = tl.cdiv(n, TILE)
    for step in range(0, tiles):
        tile = tiles - 1 - step if BACK else step
        columns = tile * TILE + lane
        there = inside & (columns < n)[None, :]
        sums = tl.load(y + columns[None, :], mask=there, other=0.0)
        for done in range(0, step):
            other = (tiles - 1 - done if BACK else done) * TILE + lane
            solved = tl.load(y + other[None, :], mask=inside & (other < n)[None, :], other=0.0)
            if BACK:  # L[other, columns]
                at = other.to(tl.int64)[:, None] * n + columns[None, :]
            else:  # Lᵀ[other, columns]
                at = columns.to(tl.int64)[None, :] * n + other[:, None]
            factor = tl.load(lower + at, mask=(other < n)[:, None] & (columns < n)[None, :], other=0.0)
            sums -= tl.dot(solved, factor, input_precision=PRECISION)
        corner = inverses + tile * inverse_tile
        if BACK:
            inverse = tl.load(corner + lane[:, None] * TILE + lane[None, :])
        else:
            inverse = tl.load(corner + lane[None, :] * TILE + lane[:, None])
        tl.store(y + columns[None, :], tl.dot(sums, inverse, input_precision=PRECISION), mask=there)
        tl.debug_barrier()
