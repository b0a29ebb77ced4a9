"""The product of an MLP's gate by one kernel, against torch, rounded where the model rounds."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES

from blr.kernels.gated import launch as launching
from blr.kernels.gated.launch import gated
from blr.kernels.gated.reference import GATES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", sorted(GATES))
def test_it_is_that_of_torch(make: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of halves of one buffer, too, and of rows that no whole number of blocks covers."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "BLOCK", 16)
    torch.manual_seed(0)
    both = 2 * torch.randn(2, 3, 2 * 21).to(dtype)
    for gate, up in (both.split(21, -1), (both[..., :21].contiguous(), both[..., 21:])):
        expected = GATES[make](gate.double(), up.double())
        found = gated(gate, up, make)
        assert found.dtype == dtype and found.is_contiguous()
        assert float((found - expected).norm() / expected.norm()) < TOLERANCES[dtype]


def test_what_it_has_no_room_for_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "MOST", 2)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for gate in (x, x[:0], x.mT.contiguous().mT):
        torch.testing.assert_close(gated(gate, gate, "swiglu"), GATES["swiglu"](gate, gate))


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int) -> None:
    signature = {"gate": "*bf16", "up": "*bf16", "y": "*bf16"} | dict.fromkeys(
        ("K", "gate_row", "up_row"), "i32"
    )
    constants = {"MAKE": "swiglu", "BLOCK": launching.BLOCK}
    found = compile_for(
        "blr.kernels.gated.triton", "gated_kernel", signature, constants, capability, num_warps=4
    )
    assert found["spills"] == 0
