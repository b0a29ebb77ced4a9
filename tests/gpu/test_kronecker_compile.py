"""What the compiler makes of the Kronecker-sparse kernels for sm_80 and sm_90.

No GPU is needed, but much time, and no tuned table picks these kernels.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from compiling import compile_for

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ROWS = 25088
POINTERS = {"half": "*bf16"}
SIZES = ("n", "a", "b", "c", "xn", "xf", "yn", "yf", "wa", "wb", "wc", "wd")


@cache
def decoding(pattern: tuple[int, int, int, int], rows: int) -> dict[str, Any]:
    """The kernel for few rows with its usual tiles, features contiguous, with bias."""
    from blr.kernels.layers.kronecker.triton import decode_tile

    _, b, c, d = pattern
    tile = decode_tile(*pattern)
    options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
    constants = {**tile, "HAS_BIAS": True, "wc": 1, "xf": 1, "yf": 1, "L": d, "N": rows}
    constants |= {"EVEN_B": b % tile["BB"] == 0, "EVEN_C": c % tile["BC"] == 0}
    arguments = {
        **dict.fromkeys(("x", "w", "bias", "y"), POINTERS["half"]),
        **dict.fromkeys(SIZES, "i32"),
    }
    return compile_for(
        "blr.kernels.layers.kronecker.triton",
        "decode_kernel",
        {k: v for k, v in arguments.items() if k not in constants},
        constants,
        90,
        divisible=tuple(k for k in arguments if k not in ("n", "a", *constants)),
        **options,
    )


FEW = (4, 256, 256, 4), 2


def test_few_rows_spill_nothing_and_leave_the_tensor_core_alone() -> None:
    result = decoding(*FEW)
    assert result["spills"] == 0
    assert "mma" not in result["asm"]["ptx"]


def test_rows_are_addressed_in_64_bits() -> None:
    # n·features passes 2³¹ at n = 131072 and 16384 features: row·stride is widened before the product.
    ttir = decoding(*FEW)["asm"]["ttir"]
    narrow = re.findall(r"arith\.muli [^:]*%(?:xn|yn)\b[^:]*: i32", ttir)
    wide = [name for name in ("xn", "yn") if re.search(rf"arith\.extsi %{name}\b", ttir)]
    assert not narrow
    assert wide == ["xn", "yn"]


def permutation(kind: str, d: int, gather: bool) -> dict[str, Any]:
    """The permutation of 128·d features with its default tile."""
    from blr.kernels.layers.kronecker.permute import tile_of

    size = 2 if kind == "half" else 4
    constants = {**tile_of(ROWS, 128, d, size), "D": d, "GATHER": gather, "HAS_BIAS": not gather}
    constants |= {"WIDE": False, "ff": 1, "bm": 1}
    arguments = {**dict.fromkeys(("features", "blocks", "bias"), POINTERS.get(kind, "*fp32"))}
    arguments |= dict.fromkeys(("n", "a", "m", "fn", "bl", "bn"), "i32")
    return compile_for(
        "blr.kernels.layers.kronecker.permute",
        "permute_kernel",
        arguments,
        constants,
        90,
        divisible=tuple(k for k in arguments if k not in ("n", "a")),
        num_warps=4,
    )


@pytest.mark.parametrize(
    ("kind", "d", "gather"), [("half", 4, True), ("half", 24, False), ("fp32", 3, True)]
)
def test_permutation_moves_16_bytes_at_a_time(kind: str, d: int, gather: bool) -> None:
    result = permutation(kind, d, gather)
    ptx = result["asm"]["ptx"]
    assert result["spills"] == 0
    assert re.search(r"st\.global\S*\.v4", ptx)
    # No alignment of odd d: one element at a time, or 16 bytes everywhere.
    assert (d % 2 == 0) == bool(re.search(r"ld\.global\S*\.v4", ptx))
    narrow = re.findall(r"(?:ld|st)\.global(?!\S*\.v4)\S*", ptx)
    assert not narrow or d % 2 or not gather


def test_densified_weight_spills_nothing() -> None:
    arguments = {"w": "*bf16", "dense": "*bf16", **dict.fromkeys(("b", "c", "wa", "wb", "wd"), "i32")}
    constants = {"D": 4, "BR": 16, "BF": 256, "wc": 1}
    result = compile_for(
        "blr.kernels.layers.kronecker.triton", "densify_kernel", arguments, constants, 90, num_warps=4
    )
    assert result["spills"] == 0
