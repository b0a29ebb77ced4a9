"""What the compiler makes of quantized stages: wide loads, no spills, no conversions. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
from compiling import compile_for

from blr.kernels.common.available import has_triton
from blr.kernels.decode.quantized.formats import form_of
from blr.kernels.decode.quantized.launch import QuantizedStage, QuantizedTile

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
BITS = pytest.mark.parametrize("bits", [8, 4], ids=["int8", "int4"])


def _compiled(
    bits: int, capability: int, width: int, norm: bool, dtype: str = "bf16"
) -> tuple[dict[str, Any], dict[str, int]]:
    """What the compiler makes of a stage of 4096 rows with its default tile, and the tile."""
    from blr.kernels.decode.quantized.launch import complete, tile_shape

    shape = tile_shape(4096, width, bits)
    shape = complete(shape, shape["num_warps"])
    form = form_of(bits)
    sizes = shape["BR"], shape["BQ"], shape["T"], form.quads(width) <= shape["BQ"]
    tile = QuantizedTile(*form, *sizes, NORM=int(norm))
    types = dict.fromkeys(QuantizedStage._fields, "i32") | {"x": "*fp32", "w": "*i32"}
    types |= {"z": "*fp32", "u": "*i8", "u_scale": "*bf16"}
    types |= dict.fromkeys(("scale", "mix", "bias", "y"), f"*{dtype}")
    aligned = [f"s0.{n}" for n, t in types.items() if t != "i32"]
    aligned += [f"s0.{n}" for n in ("x_block", "w_block", "w_row", "K")]
    signature = dict.fromkeys(("s0", "s1", "s2"), QuantizedStage(**types))
    signature |= {"programs0": "i32", "programs1": "i32", "gain": f"*{dtype}", "eps": "fp32"}
    constants = {"COUNT": 1, **dict.fromkeys(("T0", "T1", "T2"), tile)}
    constants |= {"ADD": True, "PDL": capability >= 90}
    made = compile_for(
        *("blr.kernels.decode.quantized.triton", "grouped_kernel", signature, constants, capability),
        divisible=(*aligned, "gain"),
        num_warps=shape["num_warps"],
    )
    return made, shape


# Bytes a thread that are spilled, by bits.
SPILLS = {8: 0, 4: 0, 3: 64, 2: 64}
KINDS = {
    "one": (1024, False),
    "normed": (4096, True),
    "short-normed": (1024, True),
    "wide": (14336, False),
    "narrow": (400, False),
}


@pytest.mark.sampled(5)
@needs_triton
@BITS
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_default_tiles_do_not_spill(bits: int, capability: int, kind: str) -> None:
    """At the sizes of Llama-7B, with loads of 16 bytes and no conversion of integers."""
    width, norm = KINDS[kind]
    made, _ = _compiled(bits, capability, width, norm)
    assert made["spills"] <= SPILLS[bits]
    ptx = made["asm"]["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert not any(f"cvt.rn.f32.{source}" in ptx for source in ("s8", "u8", "s16", "u16", "u32"))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("bits", [3, 2], ids=["int3", "int2"])
@pytest.mark.parametrize("kind", ["normed", "short-normed", "wide"])
def test_few_bits_do_not_spill_either(bits: int, kind: str) -> None:
    width, norm = KINDS[kind]
    made, _ = _compiled(bits, 90, width, norm)
    assert made["spills"] <= SPILLS[bits] and "ld.global.v4.b32" in made["asm"]["ptx"]


@pytest.mark.sampled(5)
@needs_triton
@BITS
@pytest.mark.parametrize("kind", ["one", "normed", "wide", "narrow"])
def test_tiles_stay_in_registers(bits: int, kind: str) -> None:
    """Shared memory is for sums of rows alone, and no weight costs a subtraction of its own: inputs,
    weights and scales are loaded by the threads that use them."""
    width, norm = KINDS[kind]
    made, tile = _compiled(bits, 90, width, norm)
    warps, rows = tile["num_warps"], tile["BR"] // tile["T"]
    # A sum over lanes: at most one float of every row and thread.
    assert made["shared"] <= 4 * rows * 32 * warps
    # Without what mends sums that are not finite, behind the store.
    ptx = made["asm"]["ptx"].split("st.global")[0]
    chunks = 1 if kind != "wide" else 2  # the one under way is loaded in a loop
    quads = rows * tile["T"] * tile["BQ"] // (32 * warps)
    fields = 32 // bits
    assert ptx.count("ld.global.v4.b32") == chunks * quads + fields
    products = 4 * fields * quads
    # the first product of a sum has nothing to be added to
    assert ptx.count("fma.rn.f32") + ptx.count("mul.f32") + ptx.count("mul.rn.f32") >= products
    assert ptx.count("sub.f32") + ptx.count("sub.rn.f32") < products // 8
