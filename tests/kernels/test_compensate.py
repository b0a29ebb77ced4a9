"""The kernel that rounds a group's columns does what torch does, column by column."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for

from blr.compressor.structures.gptq import compensation, round_group
from blr.kernels.decode.quantized import compensate
from blr.kernels.decode.quantized.formats import CURVE, SHIFT
from blr.kernels.decode.quantized.reference import scales_of


@pytest.mark.parametrize(("bits", "curved"), [(2, True), (3, True), (3, False), (4, True), (8, True)])
@pytest.mark.parametrize("columns", [32, 21])
def test_it_is_rounding_by_torch(bits: int, curved: bool, columns: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 40, dtype=torch.float64) @ torch.randn(40, 40, dtype=torch.float64)
    root = compensation(x.mT @ x / 400).float()[:columns, :columns].contiguous()
    part = torch.randn(7, 40)[:, :columns]
    scale = scales_of(part, bits, torch.bfloat16, root.diagonal().pow(-2), curved)
    scale[3] = 0
    found = compensate.round_group(part, root, scale, bits, curved)
    levels, latent, missed = round_group(part, root, scale, bits, curved)
    assert float((found[0] != levels).float().mean()) < 0.02  # ties
    torch.testing.assert_close(found[1][found[0] == levels], latent[found[0] == levels])
    torch.testing.assert_close(found[2][:3], missed[:3])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3])
def test_it_stays_in_registers(bits: int) -> None:
    floats = dict.fromkeys(("part", "root", "scale", "latent", "missed"), "*fp32")
    numbers = dict.fromkeys(("rows", "columns", "part_row", "part_matrix"), "i32")
    found = compile_for(
        "blr.kernels.decode.quantized.compensate",
        "round_columns",
        {**floats, **numbers, "levels": "*i8"},
        {"BITS": bits, "OFF": SHIFT[bits], "CURVED": CURVE.get(bits, 0.0), "BR": 4, "BG": 128},
        90,
        num_warps=compensate.WARPS,
    )
    assert found["spills"] == 0 and found["regs"] <= 64
