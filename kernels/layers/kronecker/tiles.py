"""Default tiles of the fused kernels, by the shape of a factor. Measured on one H200."""

from __future__ import annotations

from typing import Any

from blr.kernels.layers.kronecker.cost import H200, Machine, Problem

Config = dict[str, Any]

DECODE_ROWS = 2  # up to here CUDA cores keep up with the weights
WASTED = 1.12  # times its columns that a row's tiles may take


def cdiv(value: int, by: int) -> int:
    """value/by rounded up; `triton.cdiv` costs some microseconds on the host."""
    return -(-value // by)


def power_of_two(value: int, low: int = 1, high: int = 2**31) -> int:
    """The least power of two that is at least `value`, within [low, high]."""
    return max(low, min(high, 1 << (value - 1).bit_length()))


def group_n(p: Problem) -> int:
    """Tiles of the batch on one weight: several once the weights no longer stay in L2."""
    return 8 if p.weights * p.size > 16e6 else 1


def columns(p: Problem, machine: Machine = H200) -> int:
    """Columns l of one program: what divides d, up to 8 in half precision on wgmma and 4 elsewhere."""
    power = p.d & -p.d
    if power < 4:
        return 2 if p.d == 2 else 4
    return min(power, 8 if p.kind == "half" and machine.wgmma else 4)


def inner_tile(c: int, most: int) -> int:
    """Tile of c: `most`, or the largest power of two from 16 that wastes nothing."""
    return most if c % most == 0 else power_of_two(c & -c, 16, most)


def plain_config(p: Problem) -> Config:
    """Tiles for one column l a program: d = 1, or few rows."""
    BN = power_of_two(p.n, 16, 128)
    BB = power_of_two(p.b, 16, 128 if BN == 128 and p.kind != "fp32" else 64)
    BC = inner_tile(p.c, {"half": 64, "tf32": 32, "fp32": 16}[p.kind])
    warps = 8 if BN * BB >= 8192 else 4
    return {
        "path": "plain",
        "G": 1,
        **{"BN": BN, "BB": BB, "BC": BC, "GROUP_N": group_n(p)},
        **{"num_warps": warps, "num_stages": 3},
    }


def dense_config(p: Problem) -> Config:
    """Tiles for all d columns as one dense block."""
    return {**plain_config(p.dense()), "path": "dense"}


def grouped_config(p: Problem, machine: Machine = H200) -> Config:
    """Tiles for G columns a program: at most 128 sums a thread on wgmma (32 elsewhere)."""
    G = columns(p, machine)
    BN, stages = (128 if G == 2 or p.kind == "tf32" else 64), (2 if G == 8 else 3)
    sums = 32768 if machine.wgmma and p.d % G == 0 and p.kind in ("half", "tf32") else 8192
    BN = BN if sums > 8192 or G == 2 else 64
    BB = power_of_two(p.b, 16, sums // (G * BN))
    BC = inner_tile(p.c, 32 if p.kind == "half" else 16)
    return {
        "path": "grouped",
        **{"G": G, "BN": BN, "BB": BB, "BC": BC, "GROUP_N": group_n(p)},
        **{"num_warps": 8 if G * BN * BB > 4096 else 4, "num_stages": stages},
    }


def decode_config(p: Problem) -> Config:
    """Tiles for a few rows: enough programs for 132 SMs, else up to 4096 products a step; where columns
    lie side by side (d = 1) few rows of long runs."""
    if p.d == 1 and p.c >= 512:
        BC = 1024 if cdiv(p.c, 1024) * 1024 <= WASTED * p.c else 512
        return {"path": "decode", "BB": 2, "BC": BC, "num_warps": BC // 256, "num_stages": 3}
    BC = power_of_two(p.c, 16, 512)
    BB = power_of_two(p.a * p.b * p.d // 528 + 1, 4, max(4, 4096 // BC))
    return {"path": "decode", "BB": BB, "BC": BC, "num_warps": 4, "num_stages": 3}


def fused_config(p: Problem, machine: Machine = H200, decode_rows: int = DECODE_ROWS) -> Config:
    """The path of the fused kernels that fits the layout, and its tiles."""
    if p.n <= decode_rows:
        return decode_config(p)
    return plain_config(p) if p.d == 1 or p.n <= 16 else grouped_config(p, machine)
