"""Launches the kernels of float8: rows of activations, batched products, BLAST's mix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr.kernels.fp8.reference import E4M3, LARGEST, SLACK, Rows
from blr.kernels.gemm.launch import run_length

UNITS = 132  # multiprocessors of an H100 and an H200


class Tile(NamedTuple):
    """How a product is cut. programs: a multiprocessor, 0 for one a tile. store: 0 by pointers, 1 by the
    bulk copy engine, 2 in halves. exact: terms, at most BK, that the tensor cores add with fewer bits
    than float32 before their sum is added in float32; None for all of a row."""

    BM: int = 128
    BN: int = 128
    BK: int = 128
    GROUP: int = 8
    warps: int = 8
    stages: int = 4
    programs: int = 0
    store: int = 0
    flatten: bool = False
    tma: bool = True
    exact: int | None = None


MIXED = Tile(BM=128, BN=64, BK=128, stages=4)


def quantize_rows(
    x: Tensor,
    make: str = "",
    other: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> Rows:
    """As of `reference.quantize_rows`, one kernel; a row of `x` has stride 1."""
    from blr.kernels.fp8.triton import quantize_kernel

    n, K = x.shape
    q = torch.empty(n, K, dtype=E4M3, device=x.device)
    scale, unit_norm, norm = (torch.empty(n, dtype=torch.float32, device=x.device) for _ in range(3))
    block = 1 << max(K - 1, 1).bit_length()
    if n:
        quantize_kernel[(n,)](
            *(x, x if other is None else other, x if gain is None else gain),
            *(q, scale, unit_norm, norm, K, x.stride(0)),
            *(0 if other is None else other.stride(0), q.stride(0), eps),
            MAKE=make,
            BLOCK=block,
            SLACK=SLACK,
            LARGEST=LARGEST,
            num_warps=min(max(block // 1024, 1), 8),
        )
    return Rows(q, scale, unit_norm, norm)


def product(
    a: Tensor,
    b: Tensor,
    by_row: Tensor,
    by_col: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``out = by_row · by_col · a bᵀ + bias`` for every batch.

    Args:
        a: float8 [B, M, K], b: float8 [B, N, K], K of stride 1. by_row: float32 [M], of all batches;
            by_col: float32 [B, N]. bias: [B, N] or None.
        out: [B, M, N] of stride 1, bfloat16, float16, float32 or float8; or, with `part`,
            [B, M, N / part, part], any strides but the last.

    Returns:
        `out`.
    """
    batch, M, K = a.shape
    N = b.shape[1]
    if batch * M * N == 0:
        return out
    tile = tile or tile_for(M, N, K, batch)
    column = (0, N) if part is None else (out.stride(2), part)
    tail = (0 if bias is None else bias.stride(0), out.stride(0), out.stride(1), *column)
    scales = (by_row, by_col, out if bias is None else bias, out)
    config: dict[str, Any] = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP}
    config |= {"EXACT": tile.exact, "num_warps": tile.warps}
    config |= {"BIAS": bias is not None, "RUN": run_length(N if part is None else part)}
    tiles = -(-M // tile.BM) * -(-N // tile.BN)
    if tile.tma and tma_ready(a, b):
        store = tile.store if part is None and _stores(out, tile) else 0
        _by_engine(a, b, scales, tail, tile._replace(store=store), tiles, config)
        return out
    from blr.kernels.fp8.triton import product_kernel

    product_kernel[(tiles, batch)](
        *(a, b, *scales, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1)),
        *(by_col.stride(0), *tail),
        **config,
        num_stages=min(tile.stages, 3),
    )
    return out


def _by_engine(
    a: Tensor, b: Tensor, scales: Any, tail: Any, tile: Tile, tiles: int, config: dict[str, Any]
) -> None:
    from blr.kernels.fp8.triton import TensorDescriptor, product_tma_kernel

    batch, M, K = a.shape
    out, by_col = scales[3], scales[1]
    left, a_rows, a_cols = flat(a)
    right, b_rows, b_cols = flat(b)
    to = left
    if tile.store:
        stored, c_rows, c_cols = flat(out)
        to = TensorDescriptor.from_tensor(stored, [tile.BM, tile.BN // tile.store])
        tail = (tail[0], c_rows, c_cols, *tail[3:])
    programs = tiles * batch
    if tile.programs:
        programs = min(programs, tile.programs * _multiprocessors(a.device.index or 0))
    product_tma_kernel[(programs,)](
        TensorDescriptor.from_tensor(left, [tile.BM, tile.BK]),
        TensorDescriptor.from_tensor(right, [tile.BN, tile.BK]),
        *(to, *scales, M, b.shape[1], K, batch, a_rows, a_cols, b_rows, b_cols),
        *(by_col.stride(0), *tail),
        **config,
        STORE=tile.store,
        FLATTEN=tile.flatten,
        STAGES=tile.stages,
    )


def mix(z: Tensor, s: Tensor, out: Tensor) -> Tensor:
    """``out[k] = Σ_l s[k, l] ⊙ z[l]`` for z [b, n, r], s float32 [b, b, r], out [b, n, r] in float8."""
    from blr.kernels.fp8.triton import mix_kernel

    blocks, n, rank = z.shape
    if n:
        mix_kernel[(-(-n // 16), -(-rank // 128))](
            *(z, s, out, n, rank, z.stride(0), z.stride(1), out.stride(0), out.stride(1)),
            BLOCKS=blocks,
            TOKENS=16,
            RANKS=128,
            num_warps=4,
        )
    return out


def mixed(
    x: Tensor, V: Tensor, by_row: Tensor, by_col: Tensor, s: Tensor, out: Tensor, tile: Tile = MIXED
) -> Tensor:
    """The first product of BLAST and its mix in one kernel, z written nowhere: float8 `out` [b, n, r].

    Args:
        x: float8 [n, b·p]. V: float8 [b, r, p], b at most 4. by_row: [n]. by_col: [b, r]. s: [b, b, r].
    """
    from blr.kernels.fp8.triton import TensorDescriptor, mixed_kernel

    blocks, rank, p = V.shape
    n = x.shape[0]
    mixed_kernel[(-(-n // tile.BM) * -(-rank // tile.BN),)](
        TensorDescriptor.from_tensor(x, [tile.BM, tile.BK]),
        TensorDescriptor.from_tensor(V.view(blocks * rank, p), [tile.BN, tile.BK]),
        *(by_row, by_col, s, out, n, rank, p, rank, out.stride(0), out.stride(1)),
        BLOCKS=blocks,
        BM=tile.BM,
        BN=tile.BN,
        BK=tile.BK,
        GROUP=tile.GROUP,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def tma_ready(a: Tensor, b: Tensor) -> bool:
    """Whether the bulk copy engine can read both: rows of 16 bytes and their multiples, the batches of
    each below or beside one another, one of them ending with its K columns."""
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    return engine_reads(a) and engine_reads(b) and (_below(a) or _below(b) or a.shape[2] % 128 == 0)


def engine_reads(t: Tensor) -> bool:
    """Whether `flat` and the engine's alignment hold for float8 [B, rows, K]."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(1) % 16 == 0 and t.stride(2) == 1
    return aligned and (_below(t) or (0 < t.stride(0) < t.stride(1) and t.stride(0) % 16 == 0))


def flat(t: Tensor) -> tuple[Tensor, int, int]:
    """[B, m, k] as one matrix, and the rows and columns from one batch to the next."""
    batch, m, k = t.shape
    if _below(t):
        return torch.as_strided(t, (batch * m, k), (t.stride(1), 1), t.storage_offset()), m, 0
    width = t.stride(0) * (batch - 1) + k
    return torch.as_strided(t, (m, width), (t.stride(1), 1), t.storage_offset()), 0, t.stride(0)


def tile_for(M: int, N: int, K: int, batch: int = 1) -> Tile:
    """A tile, as measured on an H200: the wide one does a third more a tile, where there are enough."""
    if M <= 64:
        return Tile(BM=64, BN=128, warps=4)
    if batch > 1:
        return Tile(BM=128, BN=256, stages=3) if N > 128 else Tile()
    rows = -(-M // 128)
    wide, narrow = (-(-rows * -(-N // width) * batch // UNITS) for width in (256, 128))
    if N > 128 and 1.75 * wide <= narrow * (1.15 if K < 2048 else 1.0):
        return Tile(BM=128, BN=256, stages=4, programs=1, store=2, flatten=True)
    return Tile(BM=128, BN=128, warps=4)


def _below(t: Tensor) -> bool:
    return t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def _stores(out: Tensor, tile: Tile) -> bool:
    """Whether the engine can write `out` [B, M, N]: its rows aligned, no tile reaching into the next
    batch."""
    batch, M, N = out.shape
    size = out.element_size()
    if out.data_ptr() % 16 or out.stride(1) * size % 16 or out.stride(2) != 1:
        return False
    if batch == 1:
        return True
    if _below(out):
        return M % tile.BM == 0
    return 0 < out.stride(0) < out.stride(1) and out.stride(0) * size % 16 == 0 and N % tile.BN == 0


def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
