"""A product with bias and activation by one kernel, against torch, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_kernels import activated as reference
from tolerances import TOLERANCES

from blr.kernels.fused import launch as launching
from blr.kernels.fused.launch import activated


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's kernel stands for the one of a GPU with the bulk copy engine."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    monkeypatch.setattr(launching, "PRODUCTS", 1)
    monkeypatch.setattr(launching, "tma_ready", lambda a, b: True)


@pytest.mark.parametrize("activation", sorted(launching.OVER))
def test_it_is_that_of_torch(activation: str) -> None:
    """Of rows that lie apart, with and without a bias, of sizes that no tile divides."""
    torch.manual_seed(0)
    dtype = torch.float16  # the interpreter's products of bfloat16 are not right
    x = torch.randn(2, 5, 24 + 8).to(dtype)[..., :24]
    weight, bias = torch.randn(70, 24).to(dtype), torch.randn(70).to(dtype)
    for shift in (None, bias):
        given = (x.double(), weight.double(), None if shift is None else shift.double())
        exact = reference(*given, activation)
        found = activated(x, weight, shift, activation)
        assert found.dtype == dtype and found.is_contiguous()
        assert float((found - exact).norm() / exact.norm()) < TOLERANCES[dtype]


@pytest.mark.parametrize("activation", sorted(launching.OVER))
def test_what_it_has_no_kernel_for_is_the_librarys(
    activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single precision, a bias with gaps, few tokens, many ranks: torch's numbers, and no launch."""
    launched: list[Any] = []
    monkeypatch.setattr(launching, "bmm", lambda *given, **_: launched.append(given))
    x, weight, gaps = torch.randn(4, 8), torch.randn(3, 8), torch.randn(6).half()[::2]
    wide = torch.randn(5, launching.RANKS + 8), torch.randn(3, launching.RANKS + 8)
    cases = [(x, weight, None), (x.half(), weight.half(), gaps)]
    cases += [(wide[0].half(), wide[1].half(), None)]
    for given in cases:
        assert torch.equal(activated(*given, activation), reference(*given, activation))
    activated(x.half(), weight.half(), None, activation)
    assert len(launched) == 1
    monkeypatch.setattr(launching, "PRODUCTS", 5)
    few = x[:2].half(), weight.half(), None
    assert torch.equal(activated(*few, activation), reference(*few, activation))
    assert len(launched) == 1


def test_gelu_keeps_its_tail() -> None:
    """Relative to what torch gives in double precision, down to results of 2e-5."""
    x = torch.linspace(-4.4, 4.4, 64).half()[:, None]
    found = activated(x, torch.ones(1, 1).half(), None, "gelu")
    exact = torch.nn.functional.gelu(x.double())
    assert float(((found - exact).abs() / exact.abs()).max()) < TOLERANCES[torch.float16]
