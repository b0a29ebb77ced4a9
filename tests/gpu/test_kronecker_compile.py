"""What the compiler makes of the Kronecker-sparse kernels for sm_80 and sm_90.

No GPU is needed, but much time, and no tuned table picks these kernels.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from compiling import compile_for

from blr.kernels.layers.kronecker.cost import A100, H200, Problem
from blr.kernels.layers.kronecker.tiles import fused_config

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

ROWS = 25088
POINTERS = {"half": "*bf16"}
MACHINES = {80: A100, 90: H200}
SIZES = ("n", "a", "b", "c", "xn", "xf", "yn", "yf", "wa", "wb", "wc", "wd")


@cache
def compiled(p: Problem, capability: int) -> dict[str, Any]:
    """The fused kernel of `p` with its default tiles, features contiguous, with bias."""
    config = dict(fused_config(p, MACHINES[capability]))
    path = config.pop("path")
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    constants = {**config, "HAS_BIAS": True, "wc": 1, "xf": 1, "yf": 1}
    constants |= {"D" if path == "grouped" else "L": p.d}
    constants |= {"EVEN_B": p.b % config["BB"] == 0, "EVEN_C": p.c % config["BC"] == 0}
    if path == "plain":
        del constants["G"]
    if path == "decode":
        constants["N"] = p.n
    else:
        constants["PRECISION"] = {"half": "ieee", "fp32": "ieee"}.get(p.kind, p.kind)
    pointer = POINTERS.get(p.kind, "*fp32")
    arguments = {**dict.fromkeys(("x", "w", "bias", "y"), pointer), **dict.fromkeys(SIZES, "i32")}
    module = "grouped" if path == "grouped" else "triton"
    name = {"grouped": "grouped_kernel", "decode": "decode_kernel"}.get(path, "plain_kernel")
    aligned = tuple(k for k in arguments if k not in ("n", "a", *constants))
    return compile_for(
        f"blr.kernels.layers.kronecker.{module}",
        name,
        {k: v for k, v in arguments.items() if k not in constants},
        constants,
        capability,
        divisible=aligned,
        **options,
    )


SQUARE = Problem(4, 128, 128, 16, ROWS, "half")
COLUMN = Problem(2, 256, 256, 1, ROWS, "half")
FEW = Problem(4, 256, 256, 4, 2, "half")
CASES = [(SQUARE, 90), (Problem(1, 64, 64, 4, ROWS, "tf32"), 90), (SQUARE, 80)]


@pytest.mark.parametrize(("p", "capability"), CASES, ids=str)
def test_grouped_spills_nothing_and_uses_the_tensor_core(p: Problem, capability: int) -> None:
    result = compiled(p, capability)
    ptx = result["asm"]["ptx"]
    assert result["spills"] == 0
    assert ("wgmma.mma_async" in ptx) == (capability == 90)
    assert ("mma.sync" in ptx) == (capability == 80)
    assert "cp.async" in ptx
    # Four register operands of x stand where one in shared memory would be a descriptor.
    products = re.findall(r"wgmma\.mma_async[^;]*;", ptx, re.S)
    assert all(re.search(r"\},\s*\{[^}]*\},\s*%rd", product) for product in products)


@pytest.mark.parametrize(
    "p",
    [COLUMN, Problem(2, 64, 64, 4, ROWS, "tf32").dense()],
    ids=str,
)
def test_two_dimensional_tiles_spill_nothing(p: Problem) -> None:
    result = compiled(p, 90)
    assert result["spills"] == 0
    assert "wgmma.mma_async" in result["asm"]["ptx"]


def test_few_rows_spill_nothing_and_leave_the_tensor_core_alone() -> None:
    result = compiled(FEW, 90)
    assert result["spills"] == 0
    assert "mma" not in result["asm"]["ptx"]


@pytest.mark.parametrize("p", [COLUMN, SQUARE, FEW], ids=str)
def test_rows_are_addressed_in_64_bits(p: Problem) -> None:
    # n·features passes 2³¹ at n = 131072 and 16384 features: row·stride is widened before the product.
    ttir = compiled(p, 90)["asm"]["ttir"]
    narrow = re.findall(r"arith\.muli [^:]*%(?:xn|yn)\b[^:]*: i32", ttir)
    wide = [name for name in ("xn", "yn") if re.search(rf"arith\.extsi %{name}\b", ttir)]
    assert not narrow
    assert wide == ["xn", "yn"]


def permutation(kind: str, d: int, gather: bool, parts: int = 0) -> dict[str, Any]:
    """The permutation of 128·d features with its default tile."""
    from blr.kernels.layers.kronecker.permute import tile_of

    size = 2 if kind == "half" else 4
    constants = {**tile_of(ROWS, 128, d, size), "D": d, "GATHER": gather, "HAS_BIAS": not gather}
    constants |= {"WIDE": False, "PARTS": parts, "ff": 1, "bm": 1}
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


def test_parts_are_written_by_one_pass_over_the_input() -> None:
    result = permutation("fp32", 4, True, parts=1)
    ptx = result["asm"]["ptx"]
    loads, stores = (re.findall(rf"{op}\.global\S*\.v4", ptx) for op in ("ld", "st"))
    assert result["spills"] == 0
    assert len(stores) == 3 * len(loads) > 0


def test_densified_weight_spills_nothing() -> None:
    arguments = {"w": "*bf16", "dense": "*bf16", **dict.fromkeys(("b", "c", "wa", "wb", "wd"), "i32")}
    constants = {"D": 4, "BR": 16, "BF": 256, "wc": 1}
    result = compile_for(
        "blr.kernels.layers.kronecker.triton", "densify_kernel", arguments, constants, 90, num_warps=4
    )
    assert result["spills"] == 0
