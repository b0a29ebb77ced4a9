"""What the compiler makes of the persistent kernel for A100 and H100.

No GPU is needed, but much time, and the table of the H200 picks the CUDA graph.
"""

from __future__ import annotations

import pytest
from compiling import compile_for

from blr.kernels.persistent.fields import Kind
from blr.kernels.persistent.program import Piece, Tuning, choose_variant

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

# Products of a 7B model of low rank, and what the kernel's arguments are.
PIECES = [
    Piece(Kind.ROWS, {}, 1024, 1, 4096, 1, 8, plain=True),
    Piece(Kind.ROWS, {}, 4096, 1, 1024, 1, 8, plain=True),
    Piece(Kind.PAIRS, {}, 11008, 1, 1488, 1, 8, plain=True, y_half=True),
    Piece(Kind.ROWS, {}, 1488, 1, 11008, 1, 8, plain=True, x_half=True),
    Piece(Kind.ROWS, {}, 4096, 1, 1488, 1, 8, plain=True),
]
# With 4 warps the phases beside the products take all 255 registers and spill 12 bytes (sm_90) whatever
# the variant, so a few values that outlive a phase are spilled as well; 8 warps spill nothing with
# Triton 3.9, 8 to 44 bytes with 3.6.
TUNINGS = [(Tuning(), 512), (Tuning(programs=1, warps=8, elements=16384), 64)]
SIGNATURE = {
    **dict.fromkeys(("table", "counter", "generation", "tokens", "pos", "start"), "*i64"),
    **dict.fromkeys(("single", "cos", "sin", "partial", "state", "values"), "*fp32"),
    **dict.fromkeys(("counters", "indices", "choices"), "*i32"),
    **{"like": "*bf16", "begin": "i32", "end": "i32"},
    **dict.fromkeys(("table_row", "splits", "chunk", "cache_row", "cache_head"), "i32"),
    **dict.fromkeys(("kv_heads", "D", "R"), "i32"),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("tuning", "spills"), TUNINGS, ids=["default", "1x8"])
def test_weights_are_loaded_in_16_bytes_and_registers_hold_them(
    tuning: Tuning, spills: int, capability: int
) -> None:
    """`spills`: bytes a thread stores and loads at most."""
    variants = list(dict.fromkeys(choose_variant(p, 132 * tuning.programs, tuning) for p in PIECES))
    constants = {"N": 1, "VARIANTS": tuple(n for v in variants for n in v), "COUNT": len(variants)}
    constants |= {"ACT": "silu", "G": 1, "GP": 1, "DP": 128, "BN": 32, "SPLITS": 8, "NORM": False}
    constants |= {"DOT": False, "PARTS": 8, "SYNC": True}
    made = compile_for(
        "blr.kernels.persistent.triton", "token_kernel", SIGNATURE, constants, capability,
        divisible=tuple(n for n, t in SIGNATURE.items() if t.startswith("*")),
        num_warps=tuning.warps, num_stages=1, maxnreg=255, launch_cooperative_grid=True,
    )  # fmt: skip
    streamed = [line for line in made["asm"]["ptx"].splitlines() if "ld.global.cg" in line]
    weights = [line for line in streamed if "b16" in line or "v4.b32" in line]
    assert weights and all("v4.b32" in line for line in weights)
    assert made["spills"] <= spills
