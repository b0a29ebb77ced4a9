"""Queries and keys rotated by one kernel, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.fused import launch as launching
from blr.kernels.fused.gradient import rotated_with_gradient
from blr.kernels.fused.launch import by_token, rotated
from blr.kernels.fused.reference import rotate

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
    monkeypatch.setattr(launching, "WIDTH", 4)
    for width in (0, 8):
        q, k = heads(2, width, torch.float16), heads(1, width, torch.float16)
        cos, sin = torch.randn(2, 1, TOKENS, width).half()
        for found, x in zip(rotated(q, k, cos, sin), (q, k), strict=True):
            assert torch.equal(found, rotate(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 6, 16])
@pytest.mark.parametrize("shared", [False, True], ids=["positions of each", "shared positions"])
def test_gradients_are_those_of_torch(
    shared: bool, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    """Of angles that differ between the halves, of gradients in whatever order, of a sum."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "HEADS", 4)
    torch.manual_seed(width)
    angles = 9 * torch.rand(1 if shared else BATCH, TOKENS, width)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k = heads(5, width, dtype), heads(1, width, dtype)
    sums = torch.ones((), dtype=dtype).expand(q.shape), torch.ones((), dtype=dtype).expand(k.shape)
    alike = torch.randn_like(q), torch.randn_like(k)
    for given in ((q, k), (q.contiguous(), k)):
        x = [t.clone().requires_grad_() for t in given]
        found = rotated_with_gradient(x[0], x[1], cos, sin)
        wide = [t.detach().double().requires_grad_() for t in given]
        exact = [rotate(t, cos.double(), sin.double()) for t in wide]
        for g in (alike, tuple(t.contiguous() for t in alike), sums):
            ours = torch.autograd.grad(found, x, g, retain_graph=True)
            theirs = torch.autograd.grad(exact, wide, [t.double() for t in g], retain_graph=True)
            for one, other, t in zip(ours, theirs, x, strict=True):
                assert one.dtype == dtype and by_token(one) == by_token(t)
                assert float((one - other).norm() / other.norm()) < TOLERANCES[dtype]
        for one, other in zip(found, exact, strict=True):
            error = (one - other).detach().norm() / other.detach().norm()
            assert float(error) < TOLERANCES[dtype]


def test_gradients_of_what_it_has_no_room_for_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in double precision, and wherever no kernel runs."""
    cos, sin = torch.randn(2, 1, TOKENS, 8)
    for mode, widest, dtype in (
        ("triton", 4, torch.float32),
        ("triton", 8, torch.float64),
        ("auto", 8, torch.float32),
    ):
        monkeypatch.setenv("BLR_KERNELS", mode)
        monkeypatch.setattr(launching, "WIDTH", widest)
        q, k = heads(2, 8, dtype).requires_grad_(), heads(1, 8, dtype).requires_grad_()
        found = rotated_with_gradient(q, k, cos.to(dtype), sin.to(dtype))
        for x, y in zip((q, k), found, strict=True):
            expected = rotate(x, cos.to(dtype), sin.to(dtype))
            assert torch.equal(y, expected)
            g = torch.randn_like(y)
            ours, theirs = (torch.autograd.grad(z, x, g)[0] for z in (y, expected))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int, back: bool) -> None:
    from blr.kernels.fused.triton import rotary_kernel

    constants = {"HALF": 64, "BLOCK": 64, "HEADS": launching.HEADS, "BACK": back}
    names = [name for name in rotary_kernel.arg_names if name not in constants]
    signature = {name: "*bf16" if n < 6 else "i32" for n, name in enumerate(names)}
    found = compile_for(
        "blr.kernels.fused.triton", "rotary_kernel", signature, constants, capability, num_warps=4
    )
    assert found["spills"] == 0
