"""Monarch in two kernels without a permutation between them (❶–❸).

Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 4 and figure 5.

The middle index of V runs along r' first and the output block k second (❶, our canonical order), so
column c of the product ``x_l V_l`` belongs to output block ``k = c // r'`` and to place
``l·r' + c mod r'`` of that block's input. The first kernel stores it there (❷):

    Z[k, n, l·r' + s] = Σ_p x[n, l·p + ·] V[l, ·, k·r' + s]         runs of r' elements
    y[n, k·q + ·]     = Σ_c Z[k, n, c] U[k, ·, c] + bias            plain batched product

The second stores blocks side by side in the canonical order of outputs; the permutation that the
paper moves into the next weight (❸) does not exist in it.

Both stages are one kernel, `product_kernel`: a batched, tiled product with any strides, a K loop
that the compiler pipelines (wgmma on sm_90), tiles in groups of GROUP rows so that neighbouring
programs share operands in L2, and either store. `blr.kernels.blast.transposed` uses it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError(
        "the Monarch kernels need triton: install it or use the reference variant"
    ) from error

SMALLEST_SHARED = 99 * 1024  # bytes a block may use on sm_86 and sm_89, the least of the cards we serve
WGMMA_SHARED = 200 * 1024  # sm_90 and sm_100 have 227 KiB, sm_80 163


@triton.jit
def grouped_tile(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP rows of tiles at a time, column by column."""
    per_group = GROUP * tiles_n
    first = (program // per_group) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + (program % per_group) % rows, (program % per_group) // rows


@triton.jit
def accumulate(
    acc, a, b, a_mask, b_mask, a_k, b_k, K,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc += A B`` over K; `a` [M, BLOCK_K] and `b` [BLOCK_K, N] point at the first tiles.

    `a_mask` [M, 1] and `b_mask` [1, N] are the readable rows and columns, `a_k` and `b_k` the strides
    along K. Rows past K are read as zeros on both sides: 0 times an unwritten NaN is NaN.
    """
    k = tl.arange(0, BLOCK_K)
    a_step = tl.full((), BLOCK_K, tl.int64) * a_k
    b_step = tl.full((), BLOCK_K, tl.int64) * b_k
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile = tl.load(a, mask=a_mask, other=0.0)
            b_tile = tl.load(b, mask=b_mask, other=0.0)
        else:
            inside = k < K - start
            a_tile = tl.load(a, mask=a_mask & inside[None, :], other=0.0)
            b_tile = tl.load(b, mask=b_mask & inside[:, None], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a += a_step
        b += b_step
    return acc


@triton.jit
def product_kernel(
    a, b, bias, c,
    M, N, K, a_rows, b_cols,
    a_batch, a_row, a_k, b_batch, b_k, b_col, c_batch, c_row, c_col, bias_batch, bias_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    INNER: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``C[g] = A[g] B[g] + bias[g]``; A[g] [M, K], B[g] [K, N], C[g] [M, N], bias[g] [N], any strides.

    `a_rows` ≤ or ≥ M and `b_cols` ≤ or ≥ N bound the reads; what lies past them counts as zero.
    INNER = 0: element (g, m, c) is stored at g·c_batch + m·c_row + c·c_col.
    INNER > 0: at (c // INNER)·c_batch + m·c_row + g·INNER + c mod INNER, figure 5's permutation;
    a constant, so that the compiler knows the alignment of the runs.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = grouped_tile(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    far_rows, far_cols = rows.to(tl.int64), cols.to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)

    a_tile = a + batch * a_batch + far_rows[:, None] * a_row + k[None, :] * a_k
    b_tile = b + batch * b_batch + k[:, None] * b_k + far_cols[None, :] * b_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = accumulate(
        acc, a_tile, b_tile, (rows < a_rows)[:, None], (cols < b_cols)[None, :], a_k, b_k, K,
        BLOCK_K, EVEN_K, PRECISION,
    )  # fmt: skip

    if HAS_BIAS:
        shift = tl.load(bias + batch * bias_batch + far_cols * bias_col, mask=cols < N, other=0.0)
        acc += shift.to(tl.float32)[None, :]
    if INNER > 0:
        places = (cols // INNER).to(tl.int64) * c_batch + cols % INNER + batch * INNER
    else:
        places = batch * c_batch + far_cols * c_col
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(c + far_rows[:, None] * c_row + places[None, :], acc.to(c.dtype.element_ty), mask=mask)


def precision(dtype: torch.dtype) -> str:
    """The `input_precision` of `tl.dot`: "tf32" for float32 where torch allows it, else "ieee"."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may use on `device` (the least we know of off the GPU)."""
    if device.type != "cuda":
        return SMALLEST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED)


def fitting(size: int, least: int, most: int) -> int:
    """The least power of two that covers `size`, within [least, most]."""
    return max(least, min(most, triton.next_power_of_2(max(size, 1))))


def tiles(m: int, n: int, k: int, batch: int, x: Tensor) -> dict[str, int]:
    """Default block sizes of one [m, k]·[k, n] product in a batch, for the dtype and device of `x`.

    128×128 in four warps, K in steps of 32. 16-bit on cards with wgmma, known by their shared memory:
    in steps of 64, and 128×256 in eight warps where K is long enough to pay for the larger prologue
    and 132 programs remain. float32 without tensor cores: 64×64×32. Stages fill the shared memory, of
    one program of 128×256 or two smaller ones; without wgmma the last stage needs no buffer.
    """
    limit, half = shared_limit(x.device), x.element_size() == 2
    wgmma = limit > WGMMA_SHARED
    most = 128 if half or precision(x.dtype) == "tf32" else 64
    block_m, block_n = fitting(m, 16, most), fitting(n, 16, most)
    block_k = fitting(k, 16, 64 if wgmma and half else 32)
    programs = batch * triton.cdiv(m, 128) * triton.cdiv(n, 256)
    if wgmma and half and block_m == 128 and n > 128 and k >= 512 and programs >= 132:
        block_n = 256
    stage = (block_m + block_n) * block_k * x.element_size() * (1 if block_n == 256 else 2)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP": 8,
        "num_warps": 8 if block_m * block_n > 128 * 128 else 4,
        "num_stages": max(2, min(4, limit // stage + (0 if wgmma else 1))),
    }


def product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    inner: int = 0,
    **config: int,
) -> Tensor:
    """``c[g] = a[g] @ b[g] + bias[g]`` by `product_kernel`; every tensor may have any strides.

    Args:
        a: [g, ≥ or ≤ m, k], b: [g, k, ≥ or ≤ n]: rows and columns missing in them count as zeros,
            those beyond `c` are not used.
        c: [g, m, n], written; with `inner` = r' it is [blocks, m, g·r'] and the columns of block j
            are the columns j·r' … j·r' + r' − 1 of every product, product after product.
        bias: [g, n] or None.
        config: overrides of `tiles`.

    Returns:
        `c`.
    """
    batch, m, n = a.shape[0], c.shape[1], b.shape[2] if inner else c.shape[2]
    config = {**tiles(m, n, a.shape[2], batch, a), **config}
    grid = (batch * triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]),)
    if not grid[0]:
        return c
    product_kernel[grid](
        a, b, bias if bias is not None else c, c,
        m, n, a.shape[2], a.shape[1], b.shape[2],
        *a.stride(), *b.stride(), *c.stride(), *(bias.stride() if bias is not None else (0, 0)),
        INNER=inner, HAS_BIAS=bias is not None, EVEN_K=a.shape[2] % config["BLOCK_K"] == 0,
        PRECISION=precision(a.dtype), **config,
    )  # fmt: skip
    return c


def spans(n: int, chunk: int | None) -> list[slice]:
    """0 … n in slices of at most `chunk`; one slice for None."""
    return [slice(begin, min(begin + (chunk or n), n)) for begin in range(0, n, chunk or max(n, 1))]


def staged(
    x: Tensor,
    U: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int | None = None,
    first: dict[str, int] | None = None,
    second: dict[str, int] | None = None,
) -> Tensor:
    """Monarch linear layer by ❶–❸: one product with a permuted store, one plain product.

    Fastest with V stored [b, r, p] (p contiguous) and with r' a multiple of 8.

    Args:
        x: [n, b·p], U: [b, q, r], V: [b, p, r], any strides; r = b·r', r' first in both.
        bias: [b·q] or None.
        chunk: tokens at a time, default all: the intermediate, b·r·chunk elements, may stay in L2.
        first, second: block sizes of the two stages (BLOCK_M over n, BLOCK_N, BLOCK_K, GROUP,
            num_warps, num_stages); what they leave out comes from `tiles`.

    Returns:
        [n, b·q] in the dtype of `x`.
    """
    blocks, q, rank = U.shape
    n = x.shape[0]
    y = torch.empty((n, blocks * q), device=x.device, dtype=x.dtype)
    pitch = triton.cdiv(rank, 16) * 16  # whole vectors a row, whatever the rank
    z = torch.empty((blocks, min(chunk or n, n), pitch), device=x.device, dtype=x.dtype)
    per_block, into = (t.unflatten(1, (blocks, -1)).transpose(0, 1) for t in (x, y))  # [b, n, p or q]
    shift = None if bias is None else bias.unflatten(0, (blocks, q))
    for span in spans(n, chunk):
        part = z[:, : span.stop - span.start, :rank]
        product(per_block[:, span], V, part, inner=rank // blocks, **(first or {}))
        product(part, U.transpose(1, 2), into[:, span], shift, **(second or {}))
    return y
