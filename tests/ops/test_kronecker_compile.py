"""What the compiler makes of the Kronecker-sparse kernels for sm_80 and sm_90, on any machine."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiling import compile_for

from blr.kernels.kronecker import choose

pytest.importorskip("triton")

ROWS = 25088
POINTERS = {"half": "*bf16"}
MACHINES = {80: choose.A100, 90: choose.H200}
SIZES = ("n", "a", "b", "c", "xn", "xf", "yn", "yf", "wa", "wb", "wc", "wd")


def compiled(
    p: choose.Problem, capability: int, config: choose.Config | None = None, batch_last: bool = False
) -> dict[str, Any]:
    """The fused kernel of `p` with its default tiles, features (or the batch) contiguous, with bias."""
    config = dict(config or choose.fused_config(p, MACHINES[capability]))
    path = config.pop("path")
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    run = config["G"] if path == "dense" else 1
    constants = {**config, "HAS_BIAS": True, "wc": 1, ("xn" if batch_last else "xf"): 1}
    constants |= {("yn" if batch_last else "yf"): 1, ("D" if path == "grouped" else "L"): p.d // run}
    constants |= {"EVEN_B": p.b * run % config["BB"] == 0, "EVEN_C": p.c * run % config["BC"] == 0}
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
        f"blr.kernels.kronecker.{module}",
        name,
        {k: v for k, v in arguments.items() if k not in constants},
        constants,
        capability,
        divisible=aligned,
        **options,
    )


CASES = [
    *[((4, 128, 128, 16), "half", 90), ((1, 64, 64, 4), "tf32", 90), ((1, 64, 64, 4), "fp32", 90)],
    *[((4, 128, 128, 16), "half", 80), ((1, 192, 48, 2), "tf32", 80)],
]


@pytest.mark.parametrize(("pattern", "kind", "capability"), CASES, ids=str)
def test_grouped_spills_nothing_and_uses_the_tensor_core(
    pattern: tuple[int, int, int, int], kind: str, capability: int
) -> None:
    result = compiled(choose.Problem(*pattern, ROWS, kind), capability)
    ptx = result["asm"]["ptx"]
    assert result["spills"] == 0
    assert ("wgmma.mma_async" in ptx) == (capability == 90 and kind != "fp32")
    assert ("mma.sync" in ptx) == (capability == 80 and kind != "fp32")
    assert "cp.async" in ptx
    # Four register operands of x stand where one in shared memory would be a descriptor.
    products = re.findall(r"wgmma\.mma_async[^;]*;", ptx, re.S)
    assert all(re.search(r"\},\s*\{[^}]*\},\s*%rd", product) for product in products)


@pytest.mark.parametrize(
    ("path", "kind", "capability"),
    [("plain", "half", 90), ("plain", "tf32", 90), ("plain", "fp32", 80), ("dense", "half", 90)],
)
def test_two_dimensional_tiles_spill_nothing(path: str, kind: str, capability: int) -> None:
    dense = path == "dense"
    pattern = (2, 64, 64, 4) if dense else (2, 256, 256, 1)
    result = compiled(choose.Problem(*pattern, ROWS, kind, prepared=dense), capability)
    assert result["spills"] == 0
    assert ("wgmma.mma_async" in result["asm"]["ptx"]) == (capability == 90 and kind != "fp32")


@pytest.mark.parametrize(("kind", "capability"), [("half", 90), ("tf32", 80)])
def test_batch_last_spills_nothing(kind: str, capability: int) -> None:
    p = choose.Problem(2, 256, 256, 4, ROWS, kind, batch_last=True)
    assert compiled(p, capability, batch_last=True)["spills"] == 0


@pytest.mark.parametrize("n", [2, 8])
def test_few_rows_spill_nothing(n: int) -> None:
    result = compiled(choose.Problem(4, 256, 256, 4, n, "half"), 90)
    assert result["spills"] == 0
    assert ("mma.sync" in result["asm"]["ptx"]) == (n > 2)


@pytest.mark.parametrize(
    ("pattern", "n"), [((4, 64, 64, 1), ROWS), ((4, 64, 64, 4), ROWS), ((4, 64, 64, 4), 2)]
)
def test_rows_are_addressed_in_64_bits(pattern: tuple[int, int, int, int], n: int) -> None:
    # n·features passes 2³¹ at n = 131072 and 16384 features: row·stride is widened before the product.
    ttir = compiled(choose.Problem(*pattern, n, "half"), 90)["asm"]["ttir"]
    narrow = re.findall(r"arith\.muli [^:]*%(?:xn|yn)\b[^:]*: i32", ttir)
    wide = [name for name in ("xn", "yn") if re.search(rf"arith\.extsi %{name}\b", ttir)]
    assert not narrow
    assert wide == ["xn", "yn"]


@pytest.mark.parametrize(("d", "gather"), [(4, True), (16, False), (3, True)])
def test_permutation_is_vectorized(d: int, gather: bool) -> None:
    from blr.kernels.kronecker.permute import tile_of

    tile = tile_of(ROWS, 128, d)
    constants = {**tile, "D": d, "GATHER": gather, "HAS_BIAS": not gather, "ff": 1, "bm": 1}
    arguments = {**dict.fromkeys(("features", "blocks", "bias"), "*fp32")}
    arguments |= dict.fromkeys(("n", "m", "fn", "bl", "bn"), "i32")
    result = compile_for(
        "blr.kernels.kronecker.permute",
        "permute_kernel",
        arguments,
        constants,
        90,
        divisible=tuple(k for k in arguments if k != "n"),
        num_warps=4,
    )
    ptx = result["asm"]["ptx"]
    assert result["spills"] == 0
    assert re.search(r"st\.global\S*\.v4", ptx)
    assert (d % 4 == 0) == bool(re.search(r"ld\.global\S*\.v4", ptx))  # no alignment of odd d
