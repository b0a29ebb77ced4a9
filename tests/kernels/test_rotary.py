"""Queries and keys rotated by one kernel, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.rotary import launch as launching
from blr.kernels.rotary.launch import rotated
from blr.kernels.rotary.reference import rotate

BATCH, TOKENS = 2, 3


def heads(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """[B, count, T, width] as it lies behind a projection."""
    return torch.randn(BATCH, TOKENS, count, width).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 6, 16])
@pytest.mark.parametrize("shared", [False, True], ids=["positions of each", "shared positions"])
def test_it_is_that_of_torch(
    shared: bool, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads that fill no whole block, of a part of their features, and of copies in another order."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "HEADS", 4)
    torch.manual_seed(width)
    angles = 9 * torch.rand(1 if shared else BATCH, TOKENS, width)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, wide = heads(5, width, dtype), heads(1, width, dtype), heads(5, width + 4, dtype)
    for given in ((q, k), (q.contiguous(), k), (wide[..., :width], wide[..., 4:])):
        for found, x in zip(rotated(*given, cos, sin), given, strict=True):
            exact = rotate(x.double(), cos.double(), sin.double())
            assert found.dtype == dtype and found.shape == x.shape
            assert float((found - exact).norm() / exact.norm()) < TOLERANCES[dtype]


def test_what_it_has_no_room_for_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "WIDEST", 4)
    for width in (0, 8):
        q, k = heads(2, width, torch.float16), heads(1, width, torch.float16)
        cos, sin = torch.randn(2, 1, TOKENS, width).half()
        for found, x in zip(rotated(q, k, cos, sin), (q, k), strict=True):
            assert torch.equal(found, rotate(x, cos, sin))


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int) -> None:
    from blr.kernels.rotary.triton import rotary_kernel

    constants = {"HALF": 64, "BLOCK": 64, "HEADS": launching.HEADS}
    names = [name for name in rotary_kernel.arg_names if name not in constants]
    signature = {name: "*bf16" if n < 6 else "i32" for n, name in enumerate(names)}
    found = compile_for(
        "blr.kernels.rotary.triton", "rotary_kernel", signature, constants, capability, num_warps=4
    )
    assert found["spills"] == 0
