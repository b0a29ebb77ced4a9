"""Layer normalization by one kernel, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES

from blr.kernels.fused import launch as launching
from blr.kernels.fused.launch import is_faster, layer_norm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "LEAST", 1)
    monkeypatch.setattr(launching, "NORMED", 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("width", [1, 7, 16, 100])
def test_it_is_that_of_torch(width: int, shift: bool, dtype: torch.dtype) -> None:
    """Of rows that fill no whole program, of parts of wider rows."""
    torch.manual_seed(width)
    wide = (3 + 2 * torch.randn(2, 5, width + 3)).to(dtype)
    weight = torch.randn(width).to(dtype)
    bias = torch.randn(width).to(dtype) if shift else None
    for x in (wide[..., :width], wide[..., 3:].contiguous(), wide[0, :, :width]):
        assert is_faster(x)
        given = (weight.double(), None if bias is None else bias.double(), 1e-5)
        exact, found = (
            torch.nn.functional.layer_norm(x.double(), (width,), *given),
            layer_norm(x, weight, bias, 1e-5),
        )
        assert found.dtype == dtype and found.is_contiguous()
        assert float((found - exact).norm()) <= TOLERANCES[dtype] * float(exact.norm() + 1e-6)


def test_what_it_has_no_room_for_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "WIDEST", 8)
    weight = torch.randn(9)
    for dtype in (torch.bfloat16, torch.float32):
        x, gain = torch.randn(3, 9).to(dtype), weight.to(dtype)
        assert not is_faster(x)
        expected = torch.nn.functional.layer_norm(x, gain.shape, gain, None, 1e-5)
        assert torch.equal(layer_norm(x, gain, None, 1e-5), expected)


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int) -> None:
    signature = dict.fromkeys(("x", "weight", "bias", "y"), "*bf16")
    signature |= dict.fromkeys(("n", "K", "x_row", "y_row"), "i32") | {"eps": "fp32"}
    constants = {"BIAS": True, "ROWS": 4, "BLOCK": 1024}
    found = compile_for(
        "blr.kernels.fused.triton",
        "layer_norm_kernel",
        signature,
        constants,
        capability,
        num_warps=8,
    )
    assert found["spills"] == 0
