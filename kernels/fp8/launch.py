"""Launches the kernels of float8: rows of activations, batched products, BLAST's mix, and whole layers.

Between the two products of a layer z is stored in float8, too. Its scale need not be measured: ``|z_j|
<= ‖x‖ ‖v_j‖``, so ``448 z / (‖x‖ C)`` with C the longest of the v_j never leaves the range, and the
exponents of e4m3 hold what lies up to four orders of magnitude below as finely as what is large. A row
of z is scaled before any of it is known, and the second product is a plain one: no scales in its sum.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.available import multiprocessors, supports_pdl
from blr.kernels.common.launching import launch
from blr.kernels.decode.gemm.launch import below, flat, run_length
from blr.kernels.fp8.reference import E4M3, LARGEST, LINE, SLACK, Rows, Scales, room_for

UNITS = 132  # multiprocessors of an H100 and an H200
SHORT = 256  # terms of a sum that ends before its pipeline is full
GROUP = 8  # rows of tiles whose programs are neighbours
BESIDE = ("layer", "swiglu", "geglu")  # what is made of a second tensor, too


class Fp8Tile(NamedTuple):
    """How a product is cut. lasting: by a program a multiprocessor, which stores tiles in halves through
    the bulk copy engine where that can write, not by one a tile."""

    BM: int = 128
    BN: int = 128
    BK: int = 128
    warps: int = 8
    stages: int = 4
    lasting: bool = False


def quantize_rows(
    x: Tensor,
    make: str = "",
    other: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    keep: Tensor | None = None,
) -> Rows:
    """As of `reference.quantize_rows`, one kernel; rows of all have stride 1."""
    assert other is not None or make not in BESIDE
    n, K = x.shape
    q = torch.empty(n, K, dtype=E4M3, device=x.device)
    made = Rows(q, torch.empty(3, room_for(n), dtype=torch.float32, device=x.device))
    if not n:
        return made
    from blr.kernels.fp8.triton import quantize_kernel

    block = 1 << max(K - 1, 1).bit_length()
    beside = other.stride(0) if other is not None and other.dim() == 2 else 0
    tensors = (x if t is None else t for t in (other, gain, keep))
    numbers = (K, x.stride(0), beside, 0 if keep is None else keep.stride(0), K, eps)
    constants = {"MAKE": make, "BLOCK": block, "SLACK": SLACK, "LARGEST": LARGEST}
    launch(
        quantize_kernel,
        (n,),
        (x, *tensors, q, made.scale, made.unit_norm, made.norm, *numbers),
        {**constants, "KEEP": keep is not None},
        num_warps=min(max(block // 1024, 1), 8),
    )
    return made


def product(
    a: Tensor,
    b: Tensor,
    by_row: Tensor,
    by_col: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    tile: Fp8Tile | None = None,
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
    (batch, M, K), N = a.shape, b.shape[1]
    if batch * M * N == 0:
        return out
    tile = tile or tile_for(M, N, K, batch)
    tiles = -(-M // tile.BM) * -(-N // tile.BN)
    column = (0, N) if part is None else (out.stride(2), part)
    place = out.stride(0), out.stride(1)
    tensors = by_row, by_col, out if bias is None else bias, out
    steps = by_col.stride(0), 0 if bias is None else bias.stride(0)
    constants: dict[str, object] = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": GROUP}
    constants |= {"BIAS": bias is not None, "RUN": run_length(N if part is None else part)}
    if not tma_ready(a, b):
        from blr.kernels.fp8.triton import product_kernel

        numbers = (M, N, K, *a.stride()[:2], *b.stride()[:2], *steps, *place, *column)
        options = {"num_stages": min(tile.stages, 3), "num_warps": tile.warps}
        launch(product_kernel, (tiles, batch), (a, b, *tensors, *numbers), constants, **options)
        return out
    from blr.kernels.fp8.triton import product_tma_kernel

    (left, *a_at), (right, *b_at) = _box(a, tile.BM, tile.BK), _box(b, tile.BN, tile.BK)
    to = left
    if halves := tile.lasting and part is None and _stores(out, tile):
        to, down, across = _box(out, tile.BM, tile.BN // 2)
        place = down, across
    programs = min(tiles * batch, multiprocessors(a.device)) if tile.lasting else tiles * batch
    numbers = (M, N, K, batch, *a_at, *b_at, *steps, *place, *column)
    constants |= {"HALVES": halves, "FLATTEN": tile.lasting, "STAGES": tile.stages}
    given = (left, right, to, *tensors, *numbers)
    launch(product_tma_kernel, (programs,), given, constants, num_warps=tile.warps)
    return out


def _box(t: Tensor, rows: int, cols: int) -> tuple[object, int, int]:
    """The descriptor of [B, m, k], and the rows and columns from one batch to the next."""
    from blr.kernels.fp8.triton import TensorDescriptor

    whole, down, across = flat(t)
    return TensorDescriptor(t, [*whole.shape], [*whole.stride()], [rows, cols]), down, across


def mix(z: Tensor, s: Tensor, out: Tensor) -> Tensor:
    """``out[k] = Σ_l s[k, l] ⊙ z[l]`` for z [b, n, r], s float32 [b, b, r], out [b, n, r] in float8."""
    from blr.kernels.fp8.triton import mix_kernel

    blocks, n, rank = z.shape
    width = 1 << (blocks - 1).bit_length()
    tokens = max(64 // width, 1)
    given = (z, s, out, n, rank, *z.stride()[:2], *out.stride()[:2])
    constants = {"BLOCKS": blocks, "WIDTH": width, "TOKENS": tokens, "RANKS": 128}
    if n:
        launch(mix_kernel, (-(-n // tokens), -(-rank // 128)), given, constants, num_warps=4)
    return out


def tma_ready(a: Tensor, b: Tensor) -> bool:
    """Whether the bulk copy engine can read both: rows of 16 bytes and their multiples, the batches of
    each below or beside one another, one of them ending with its K columns."""
    if not supports_pdl(a.device):  # a device that starts kernels early has the engine
        return False
    return engine_reads(a) and engine_reads(b) and (below(a) or below(b) or a.shape[2] % 128 == 0)


def engine_reads(t: Tensor) -> bool:
    """Whether `flat` and the engine's alignment hold for float8 [B, rows, K]."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(1) % 16 == 0 and t.stride(2) == 1
    return aligned and (below(t) or (0 < t.stride(0) < t.stride(1) and t.stride(0) % 16 == 0))


def tile_for(M: int, N: int, K: int, batch: int = 1) -> Fp8Tile:
    """A tile, as measured on an H200: the wide one does a third more, where there are enough; where
    there are few, smaller ones keep more multiprocessors busy."""
    if M <= 64:
        return Fp8Tile(BM=64, BN=128, warps=4)
    rows = -(-M // 128)
    if batch > 1:
        return _batched(rows * batch, N, K)
    if -(-M // 64) * -(-N // 64) <= UNITS:
        return Fp8Tile(BM=64, BN=64, stages=6, warps=4)
    wide, narrow = (-(-rows * -(-N // width) // UNITS) for width in (256, 128))
    if N > 128 and 1.75 * wide <= narrow * (1.15 if K < 2048 else 1.0):
        return Fp8Tile(BM=128, BN=256, stages=4, lasting=True)
    return Fp8Tile(BM=128, BN=128, warps=4)


def _batched(rows: int, N: int, K: int) -> Fp8Tile:
    """The same for blocks with so many rows of tiles in all."""
    if N <= 128 or rows * -(-N // 256) < UNITS:
        return Fp8Tile() if rows * -(-N // 128) >= 2 * UNITS else Fp8Tile(BM=64, BN=128, warps=4)
    if K <= SHORT:  # a program stores while the next tile is on its way
        return Fp8Tile(BM=128, BN=256, stages=3, lasting=True)
    return Fp8Tile(BM=128, BN=256, stages=3)


def _stores(out: Tensor, tile: Fp8Tile) -> bool:
    """Whether the engine can write `out` [B, M, N]: its rows aligned, no tile reaching into the next
    batch."""
    batch, M, N = out.shape
    size = out.element_size()
    if out.data_ptr() % 16 or out.stride(1) * size % 16 or out.stride(2) != 1:
        return False
    if batch == 1:
        return True
    if below(out):
        return M % tile.BM == 0
    return 0 < out.stride(0) < out.stride(1) and out.stride(0) * size % 16 == 0 and N % tile.BN == 0


def dense(
    x: Rows, weight: Tensor, V: None, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y = x Wᵀ + bias``, [n, o]. weight: float8 [o, i], scales.second: float32 [o]."""
    y = torch.empty(len(x.q), len(weight), dtype=dtype, device=weight.device)
    bias = None if bias is None else bias[None]
    product(x.q[None], weight[None], x.scale, scales.second[None], y[None], bias)
    return y


def lowrank(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y = (x V) Uᵀ + bias``, [n, o], by our products. U: float8 [1, o, r], V: float8 [1, r, i]."""
    assert scales.first is not None
    z = inner(x, V, scales.first)
    y = torch.empty(len(x.q), U.shape[1], dtype=dtype, device=U.device)
    bias = None if bias is None else bias[None]
    product(z[None], U, x.norm, scales.second, y[None], bias)
    return y


def inner(x: Rows, V: Tensor, first: Tensor) -> Tensor:
    """z [n, r] of low rank, between its products. V: float8 [1, r, i], first: float32 [1, r]."""
    z = _rows(1, len(x.q), V.shape[1], x.q)
    product(x.q[None], V, x.unit_norm, first, z)
    return z[0]


def monarch(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y_k = Σ_l U_kl V_klᵀ x_l + bias_k``. U: float8 [b, q, r], V: float8 [b, r, p]."""
    blocks, middle, p = V.shape
    n, part = len(x.q), middle // blocks
    z = _rows(blocks, n, middle, x.q)  # [k, n, (l, r')]
    assert scales.first is not None
    stored = z.unflatten(2, (blocks, part)).permute(2, 1, 0, 3)  # [l, n, k, r']
    parts = x.q.view(n, blocks, p).transpose(0, 1)
    product(parts, V, x.unit_norm, scales.first, stored, part=part)
    return _second(x, z, U, scales, dtype, bias)


def blast(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y_k = U_k Σ_l S_kl ⊙ (V_lᵀ x_l) + bias_k``. U: float8 [b, q, r], V: float8 [b, r, p]."""
    blocks, rank, p = V.shape
    n = len(x.q)
    assert scales.first is not None and scales.mix is not None
    parts, w = x.q.view(n, blocks, p).transpose(0, 1), _rows(blocks, n, rank, x.q)
    z = torch.empty(blocks, n, rank, dtype=dtype, device=U.device)
    product(parts, V, x.unit_norm, scales.first, z)
    mix(z, scales.mix, w)
    return _second(x, w, U, scales, dtype, bias)


def _second(
    x: Rows, z: Tensor, U: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    blocks, q, _ = U.shape
    y = torch.empty(len(x.q), blocks, q, dtype=dtype, device=U.device)
    bias = None if bias is None else bias.view(blocks, q)
    product(z, U, x.norm, scales.second, y.transpose(0, 1), bias)
    return y.view(len(x.q), blocks * q)


def _rows(blocks: int, n: int, width: int, like: Tensor) -> Tensor:
    """Memory for float8 [blocks, n, width] whose rows the bulk copy engine can read."""
    room = -(-width // LINE) * LINE
    return torch.empty(blocks, n, room, dtype=E4M3, device=like.device)[:, :, :width]


LAYERS: dict[str, Callable[..., Tensor]] = {
    **{"dense": dense, "lowrank": lowrank, "monarch": monarch, "blast": blast}
}
