"""What the compiler makes of products of bytes: half an instruction a weight, inputs and weights in
registers. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
from compiling import compile_for

from blr.kernels.common.available import has_triton
from blr.kernels.decode.quantized.formats import form_of
from blr.kernels.decode.quantized.launch import QuantizedStage, QuantizedTile

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
WIDTH, GROUP, RANKS = 4096, 128, 16  # of an 8B's layers
STAGE = QuantizedStage(
    **{
        **dict.fromkeys(QuantizedStage._fields, "i32"),
        **{"x": "*fp32", "w": "*i32", "y": "*fp32", "z": "*fp32", "u": "*i8"},
        **dict.fromkeys(("scale", "mix", "bias", "u_scale"), "*bf16"),
    }
)
ENDS = ("i32", "i32", "i32")


def tile_of(bits: int, deep: int, ranks: int) -> tuple[QuantizedTile, int]:
    """A full tile of `deep` rows a thread, and its warps."""
    form = form_of(bits, GROUP)
    quads = form.quads(WIDTH)
    warps = max(quads // 32, 4)
    beside = 32 * warps // quads
    sizes = {
        "BR": deep * beside,
        "BQ": quads,
        "T": beside,
        "ONE": True,
        "FULL": True,
        "NORM": int(bits == 4),
    }
    return QuantizedTile(*form, **sizes, RANKS=ranks, U_GROUP=32 if ranks else 0), warps


def compiled(
    module: str, kernel: str, signature: Any, constants: Any, capability: int, warps: int
) -> Any:
    constants = {**constants, "ASM": True, "PDL": capability >= 90}
    return compile_for(module, kernel, signature, constants, capability, num_warps=warps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("pair", [False, True], ids=["rows", "pair"])
def test_rows_of_inputs_made_before(pair: bool, bits: int, capability: int) -> None:
    """Two stages of half as many rows a thread take no more registers than one."""
    from blr.kernels.decode.integer.launch import DEEPEST, table

    tile, warps = tile_of(bits, DEEPEST // (1 + pair), RANKS)
    low, high = table()
    signature: dict[str, Any] = {"words": "*i32", "sums": "*fp32", "quads": "i32"}
    constants: dict[str, Any] = {"LOW": low, "HIGH": high, "T0": tile, "T1": tile}
    if pair:
        signature |= {"gate": STAGE, "up": STAGE}
        constants |= {"ACT": "silu"}
    else:
        signature |= {"s0": STAGE, "s1": STAGE, "s2": STAGE, "ends": ENDS}
        constants |= {"T2": tile, "COUNT": 1, "ADD": False}
    module, kernel = "blr.kernels.decode.integer.rows", "gated_kernel" if pair else "rows_kernel"
    made = compiled(module, kernel, signature, constants, capability, warps)
    assert made["asm"]["ptx"].count("dp4a.") == DEEPEST * 4 * tile.FIELDS // 2
    assert made["spills"] == 0 and made["regs"] <= 128


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("pair", [False, True], ids=["rows", "pair"])
def test_loops_of_four_bits(pair: bool, capability: int) -> None:
    """Within the registers that a launch asks for."""
    from blr.kernels.decode.integer.launch import DEEP, REGISTERS, offset_of

    tile, warps = tile_of(4, DEEP, 0)
    inputs = {"x": "*fp32", "gain": "*bf16", "eps": "fp32"}
    constants: dict[str, Any] = {"OFFSET": offset_of(4), "T0": tile, "T1": tile}
    if pair:
        signature: dict[str, Any] = {"gate": STAGE, "up": STAGE, "programs": "i32", **inputs}
        constants |= {"ACT": "silu"}
    else:
        signature = {"s0": STAGE, "s1": STAGE, "s2": STAGE, "ends": ENDS, **inputs}
        constants |= {"T2": tile, "COUNT": 1, "ADD": False}
    kernel = "pair_kernel" if pair else "loop_kernel"
    made = compiled("blr.kernels.decode.integer.loop", kernel, signature, constants, capability, warps)
    assert made["asm"]["ptx"].count("dp4a.") == (2 if pair else 1) * DEEP * 4 * tile.FIELDS // 2
    assert made["spills"] == 0 and made["regs"] <= REGISTERS
