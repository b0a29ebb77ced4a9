"""Permutations between the features of a batch and the blocks of a batched product, at copy speed.

`gather` turns x [n, a·m·d] into blocks [a·d, n, m] and `scatter` turns blocks into features, bias
included.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 16384
RUN_BYTES = 256  # of one row of a block, where m is as long


def cdiv(value: int, by: int) -> int:
    """value/by rounded up; `triton.cdiv` costs some microseconds on the host."""
    return -(-value // by)


def power_of_two(value: int, low: int = 1, high: int = 2**31) -> int:
    """The least power of two that is at least `value`, within [low, high]."""
    return max(low, min(high, 1 << (value - 1).bit_length()))


@triton.jit
def offset(index, stride, WIDE: tl.constexpr):
    """index·stride in 64 bits if WIDE, else in the type of the stride."""
    return index.to(tl.int64) * stride if WIDE else index * stride


@triton.jit
def permute_kernel(
    features, blocks, bias, n, a, m, fn, ff, bl, bn, bm, D: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """features[n, i·m·D + k·D + l] and blocks[i·D + l, n, k]: the second from the first or back."""
    TILES_D: tl.constexpr = (D + BD - 1) // BD
    FLAT: tl.constexpr = D == BD
    tiles_m = tl.cdiv(m, BM)
    pid = tl.program_id(0)
    tile_d, tile_m = pid % TILES_D, pid // TILES_D % tiles_m
    i = pid // TILES_D // tiles_m % a
    first = (pid // TILES_D // tiles_m // a).to(tl.int64) * BN
    rows, ks, ls = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    column = i * (m * D) + tile_m * (BM * D) + tile_d * BD
    f_base = features + first * fn + column.to(tl.int64) * ff
    b_base = blocks + (i * D + tile_d * BD).to(tl.int64) * bl + first * bn
    b_base += (tile_m * BM).to(tl.int64) * bm
    in_n, in_m = rows < n - first, ks < m - tile_m * BM
    inside = in_m[:, None] & (ls < D - tile_d * BD)[None, :]
    b_mask = in_n[:, None, None] & inside[None, :, :]
    b_at = b_base + offset(rows, bn, WIDE)[:, None, None] + offset(ks, bm, WIDE)[None, :, None]
    b_at += offset(ls, bl, WIDE)[None, None, :]
    if FLAT:
        run = tl.arange(0, BM * BD)
        in_run = run < (m - tile_m * BM) * D
        f_mask = in_n[:, None] & in_run[None, :]
        f_at = f_base + offset(rows, fn, WIDE)[:, None] + offset(run, ff, WIDE)[None, :]
    else:
        run = (ks * D)[:, None] + ls[None, :]
        in_run = inside
        f_mask = b_mask
        f_at = f_base + offset(rows, fn, WIDE)[:, None, None] + offset(run, ff, WIDE)[None, :, :]
    if GATHER:
        tile = tl.reshape(tl.load(f_at, mask=f_mask), [BN, BM, BD])
        tl.store(b_at, tile, mask=b_mask)
    else:
        tile = tl.load(b_at, mask=b_mask)
        if FLAT:
            tile = tl.reshape(tile, [BN, BM * BD])
        if HAS_BIAS:
            shift = tl.load(bias + column + run, mask=in_run, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) + tl.expand_dims(shift, 0)).to(tile.dtype)
        tl.store(f_at, tile, mask=f_mask)


def columns_of(d: int, size: int) -> int:
    """Columns l of a tile: all of them up to 32, else what leaves few lanes idle and runs of some
    sectors of 32 bytes."""
    if power_of_two(d) <= 32:
        return power_of_two(d)
    return min((32, 16), key=lambda columns: cdiv(d, columns) * (columns + 16 // size))


@lru_cache(maxsize=4096)
def tile_of(n: int, m: int, d: int, size: int) -> dict[str, int]:
    """Tile sizes of 16 kB for elements of `size` bytes: rows of blocks of up to 256 bytes."""
    BD = columns_of(d, size)
    BM = min(power_of_two(m), RUN_BYTES // size)
    while BM > 32 and cdiv(m, BM) * BM * 3 > m * 4:  # over a quarter of the lanes idle
        BM //= 2
    BN = max(1, min(TILE_BYTES // size // (BD * BM), power_of_two(n)))
    return {"BN": BN, "BM": BM, "BD": BD}


def wide(tile: dict[str, int], features: Tensor, blocks: Tensor, d: int) -> bool:
    """Whether offsets inside a tile need 64 bits."""
    (fn, ff), (bl, bn, bm) = features.stride(), blocks.stride()
    BN, BM, BD = tile["BN"], tile["BM"], tile["BD"]
    return max(BN * fn + BM * max(d, BD) * ff, BD * bl + BN * bn + BM * bm) >= 2**31


def launch(features: Tensor, blocks: Tensor, bias: Tensor | None, d: int, gather: bool) -> None:
    """Run the kernel over features [n, a·m·d] and blocks [a·d, n, m]."""
    count, n = blocks.shape[:2]
    a, m = count // d, features.shape[1] // count
    tile = tile_of(n, m, d, features.element_size())
    tiles = cdiv(d, tile["BD"]) * cdiv(m, tile["BM"]) * cdiv(n, tile["BN"])
    permute_kernel[(tiles * a,)](
        *(features, blocks, bias, n, a, m, *features.stride(), *blocks.stride()),
        **{"D": d, "GATHER": gather, "HAS_BIAS": bias is not None},
        WIDE=wide(tile, features, blocks, d),
        num_warps=4,
        **tile,
    )


def gather(x: Tensor, a: int, d: int) -> Tensor:
    """Blocks [a·d, n, m], contiguous, of features x [n, a·m·d] in any strides."""
    n, features = x.shape
    blocks = x.new_empty(a * d, n, features // (a * d))
    launch(x, blocks, None, d, True)
    return blocks


def scatter(blocks: Tensor, d: int, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """Features `out` [n, a·m·d] of blocks [a·d, n, m], plus bias [a·m·d] (contiguous) added in fp32."""
    launch(out, blocks, bias, d, False)
    return out
