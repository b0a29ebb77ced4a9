"""Activations of a low-rank layer's output, which are made with it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from blr.compressor.modeling import products
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common import transient
from blr.kernels.fused.activated.reference import activated as reference


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> StructuredLinear:
    """Whose outputs are made where they are used, in parts of any size."""
    monkeypatch.setattr(transient, "LEAST", 5)
    monkeypatch.setenv(transient.VARIABLE, "0.0001")
    torch.manual_seed(0)
    made = StructuredLinear(LowRankSpec(8, 8, 3), bias=True)
    made.defers = True
    return made


@torch.no_grad()
def test_they_are_applied_where_the_product_is_made(
    layer: StructuredLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel, if it is a product that nobody else reads and an activation that kernels know."""
    seen: list[str] = []

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        seen.append(activation)
        return reference(x, weight, bias, activation)

    monkeypatch.setattr(products, "activated", kernel)
    monkeypatch.setattr(products, "MANY", 1)
    x = torch.randn(2, 5, 8)
    whole = layer.product(x, layer.bias)
    tanh = partial(functional.gelu, approximate="tanh")
    for function in (functional.gelu, tanh, functional.silu, functional.relu):
        assert torch.allclose(torch.cat([function(layer(x))]), function(whole), atol=1e-6)
    assert seen == ["gelu", "gelu_tanh", "silu", "relu"]
    torch.cat([functional.mish(layer(x))])
    y = layer(x)
    hidden, again = functional.gelu(y), y + 1
    assert torch.allclose(torch.cat([hidden]) + torch.cat([again]), functional.gelu(whole) + whole + 1)
    assert len(seen) == 4


@torch.no_grad()
@pytest.mark.parametrize("many", [1, 10**6])
def test_each_product_is_made_once(
    many: int, layer: StructuredLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel applies the activation, too: of one part, one product with V and one with U."""
    monkeypatch.setattr(products, "MANY", many)
    hidden = functional.gelu(layer(torch.randn(2, 5, 8)))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.cat([hidden])
    counts = {e.key: e.count for e in seen.key_averages()}
    assert counts.get("aten::mm", 0) + counts.get("aten::addmm", 0) == 2, counts
