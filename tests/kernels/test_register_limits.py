"""Products of one token whose registers are limited compile for sm_90 without spills."""

from __future__ import annotations

import pytest
from compiling import compile_launches

from blr.kernels.common.available import has_triton

LAUNCH = """
from blr.kernels.decode.quantized.reference import quantize
from blr.kernels.layers.packed.launch import product

rows, columns, bits, rank, curved = {rows}, {columns}, {bits}, {rank}, {curved}
packed, scale = quantize(torch.randn(64, columns), bits, torch.bfloat16, 128, curved=curved)
packed, scale = packed.repeat(rows // 64, 1), scale.repeat(rows // 64, 1)
u = torch.randn(rows, rank).bfloat16() if rank else None
v = torch.randn(rank, columns).bfloat16() if rank else None
product(torch.randn(1, columns).bfloat16(), packed, scale, None, u, v, bits, 128, curved)
"""


@pytest.mark.sampled(3)
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 14336), (1024, 4096)])
def test_they_do_not_spill(rows: int, columns: int, bits: int, rank: int) -> None:
    for curved in {False, bits == 3}:
        code = LAUNCH.format(rows=rows, columns=columns, bits=bits, rank=rank, curved=curved)
        made = compile_launches(code)
        assert made and not any(spilled for _, spilled in made), made
