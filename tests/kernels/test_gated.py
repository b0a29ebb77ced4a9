"""The product of an MLP's gate by one kernel, against torch, rounded where the model rounds."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES

from blr.kernels.fused import gradient
from blr.kernels.fused import launch as launching
from blr.kernels.fused.gradient import gated_with_gradient
from blr.kernels.fused.launch import gated
from blr.kernels.fused.reference import GATES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", sorted(GATES))
def test_it_is_that_of_torch(make: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of halves of one buffer, too, and of rows that no whole number of blocks covers."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "GATED", 16)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", sorted(GATES))
def test_gradients_are_those_of_torch(
    make: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    """Of large numbers on either side, of parts of a tensor, of gradients that lie apart."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(gradient, "BLOCK", 16)
    torch.manual_seed(0)
    both = 2 * torch.randn(2, 3, 2 * 21)
    both[0, 0, :4] = torch.tensor([-60.0, 60.0, 0.0, -9.0])
    both = both.to(dtype)
    for gate, up in (both.split(21, -1), (both[..., :21].contiguous(), both[..., 21:])):
        ours = [x.detach().requires_grad_() for x in (gate, up)]
        wide = [x.detach().double().requires_grad_() for x in (gate, up)]
        found, exact = gated_with_gradient(ours[0], ours[1], make), GATES[make](wide[0], wide[1])
        assert found.dtype == dtype and found.shape == gate.shape
        error = (found - exact).detach().norm() / exact.detach().norm()
        assert float(error) < TOLERANCES[dtype]
        ones = torch.ones((), dtype=dtype)
        for g in (torch.randn(2, 3, 42).to(dtype)[..., ::2], ones.expand(2, 3, 21)):
            one = torch.autograd.grad(found, ours, g, retain_graph=True)
            other = torch.autograd.grad(exact, wide, g.double(), retain_graph=True)
            for x, y in zip(one, other, strict=True):
                assert x.dtype == dtype and float((x - y).norm() / y.norm()) < TOLERANCES[dtype]


def test_gradients_of_what_it_has_no_room_for_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(gradient, "MOST", 20)
    for x in (torch.randn(3, 8), torch.randn(0, 8), torch.randn(2, 8).double()):
        gate, up = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = gated_with_gradient(gate, up, "swiglu"), GATES["swiglu"](gate, up)
        assert torch.equal(found, expected)
        ours, theirs = (torch.autograd.grad(y.sum(), (gate, up)) for y in (found, expected))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("make", sorted(GATES))
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_its_gradient_compiles(capability: int, make: str) -> None:
    signature = dict.fromkeys(("gate", "up", "g", "gate_out", "up_out"), "*bf16") | {"size": "i32"}
    found = compile_for(
        "blr.kernels.fused.triton",
        "gated_back_kernel",
        signature,
        {"MAKE": make, "BLOCK": gradient.BLOCK},
        capability,
        num_warps=gradient.WARPS,
    )
    assert found["spills"] == 0


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int) -> None:
    signature = {"gate": "*bf16", "up": "*bf16", "y": "*bf16"} | dict.fromkeys(
        ("K", "gate_row", "up_row"), "i32"
    )
    constants = {"MAKE": "swiglu", "BLOCK": launching.GATED}
    found = compile_for(
        "blr.kernels.fused.triton", "gated_kernel", signature, constants, capability, num_warps=4
    )
    assert found["spills"] == 0
