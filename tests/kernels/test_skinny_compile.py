"""What the compiler makes of skinny products: no spills, no more shared memory than there is,
asynchronous copies, fields in registers."""

from __future__ import annotations

import pytest
from compiling import compile_for

from blr.kernels.common.available import has_triton
from blr.kernels.decode.skinny.launch import (
    PLAIN,
    SkinnyStage,
    SkinnyTile,
    fitted,
    tile_shape,
    token_slots,
)

# Bits, group and tokens.
CASES = {"int4": (4, 128, 1), "int2": (2, 64, 3), "plain": (PLAIN, 0, 16), "many": (4, 128, 64)}
CASES |= {"int3": (3, 128, 8), "int3-groups": (3, 64, 16), "int8": (8, 128, 8)}
CASES["groups"] = (2, 32, 64)  # whose steps have the most inputs
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of a block


def test_fewer_stages_where_shared_memory_ends() -> None:
    """Small groups of two bits and 64 tokens: what four stages would take, no GPU has."""
    shape = tile_shape(2, 32, 4096, 4096, 64)
    found = [
        fitted(shape, (2, 32), 64, most, *pair)["STAGES"]
        for most in (227 << 10, 99 << 10)
        for pair in ((1, 1), (2, 2))
    ]
    assert [shape["STAGES"], *found] == [4, 3, 1, 1, 1]


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", ["int4", *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != "int4")]
)
def test_default_tiles_compile(case: str, capability: int) -> None:
    bits, group, tokens = CASES[case]
    shape = tile_shape(bits, group, 4096, 4096, tokens)
    shape = fitted(shape, (bits, group), token_slots(tokens), SHARED[capability])
    types = dict.fromkeys(SkinnyStage._fields, "i32")
    types |= dict.fromkeys(("x", "bias", "scale", "u"), "*bf16")
    types |= {"w": "*bf16" if bits == PLAIN else "*i16", **dict.fromkeys(("y", "z"), "*fp32")}
    stage, warps = SkinnyStage(**types), shape.pop("num_warps")
    tile = SkinnyTile(bits, group, **shape, FULL=True, ASM=capability >= 90)
    aligned = [name for name, kind in types.items() if kind != "i32"]
    aligned += ["x_token", "x_block", "w_block", "w_row", "K"]
    signature = {**dict.fromkeys(("s0", "s1", "s2"), stage), "end0": "i32", "end1": "i32"}
    signature |= {"partial": "*fp32", "counter": "*i32", "tokens": "i32"}
    constants = {"COUNT": 1, "NP": token_slots(tokens), "T0": tile, "T1": tile, "T2": tile}
    made = compile_for(
        *("blr.kernels.decode.skinny.triton", "grouped_kernel", signature),
        *({**constants, "ADD": False, "PDL": capability >= 90}, capability),
        divisible=("partial", *(f"s0.{name}" for name in aligned)),
        num_warps=warps,
    )
    ptx = made["asm"]["ptx"]
    assert made["spills"] == 0
    assert made["shared"] <= SHARED[capability]
    assert "cp.async" in ptx
    assert "mma.sync" in ptx or "wgmma" in ptx
    if capability >= 90:  # otherwise weights would pass through shared memory once more
        assert ptx.count("st.shared") <= 20


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("blocks", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_mixes_compile(blocks: int) -> None:
    from blr.kernels.decode.skinny.mix import HELD, Mix

    types = dict.fromkeys(Mix._fields, "i32") | {"z": "*fp32", "s": "*bf16", "y": "*bf16"}
    signature = {**dict.fromkeys(("m0", "m1", "m2"), Mix(**types)), "end0": "i32", "end1": "i32"}
    constants = {"COUNT": 3, "B": blocks, "BR": HELD // blocks**2, "EACH": 4, "LOW": PLAIN}
    made = compile_for(
        *("blr.kernels.decode.skinny.mix", "mix_kernel", {**signature, "tokens": "i32"}),
        *({**constants, "LOW_GROUP": 0, "PDL": True}, 90),
        num_warps=4,
    )
    assert made["spills"] == 0
