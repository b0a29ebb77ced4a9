"""Layers in kernel layout compute, train and load as the canonical layers of the same values."""

from __future__ import annotations

import pytest
import torch
from exporting import orders, stored_name
from kernel_layers import SPECS, pair
from tolerances import TOLERANCES

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", SPECS)
def test_same_outputs_and_gradients(name: str) -> None:
    layer, kernel = pair(name)
    x = torch.randn(2, 3, 20, requires_grad=True)
    results = []
    for module in (layer, kernel):
        y = module(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        y.square().sum().backward()
        results.append((y, grad))
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()
    order = orders(layer.spec)
    for factor, axes in order.items():
        stored = kernel.get_parameter(stored_name(factor))
        expected = layer.get_parameter(factor).grad.permute(axes)
        assert (stored.grad - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()


@pytest.mark.parametrize("name", SPECS)
def test_stored_tensors_are_contiguous_and_canonical_names_are_views(name: str) -> None:
    layer, kernel = pair(name)
    assert kernel.exported and isinstance(kernel, type(layer))
    stored = kernel.state_dict()
    factors = {stored_name(factor) for factor in layer.spec.shapes()}
    assert set(stored) == {*factors, "bias"}
    assert all(tensor.is_contiguous() for tensor in stored.values())
    for factor, shape in layer.spec.shapes().items():
        view = kernel.factor(factor)
        assert view.shape == shape and view.equal(layer.get_parameter(factor))
        assert view.data_ptr() == kernel.get_parameter(stored_name(factor)).data_ptr()


@pytest.mark.parametrize("name", SPECS)
def test_moving_and_casting_keeps_the_layout(name: str) -> None:
    _, kernel = pair(name)
    before = {key: tensor.shape for key, tensor in kernel.state_dict().items()}
    kernel.to(torch.float64).relayout_()
    assert {key: tensor.shape for key, tensor in kernel.state_dict().items()} == before
    assert kernel(torch.randn(1, 20, dtype=torch.float64)).dtype == torch.float64


def test_factors_that_a_structure_does_not_have_are_absent() -> None:
    _, kernel = pair("svd")
    assert not hasattr(kernel, "S") and not hasattr(kernel, "factors")
