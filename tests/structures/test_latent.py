"""Latent weights: what the model computes with is what is stored, and it can be trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blr.compressor.structures.latent import Banks, GroupPlace, Latent, RoundedGrid
from blr.kernels.decode.quantized.reference import levels_of, values_of

TURNED = GroupPlace(lambda t: t.mT, lambda t: t.mT)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_the_parameter_is_on_the_stored_grid(bits: int, turned: bool) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(10, 7))
    place = TURNED if turned else GroupPlace(lambda t: t, lambda t: t)
    found = Latent(parameter, RoundedGrid(bits, 4), place)
    Banks([found]).publish()
    levels, scale = found.rounded()
    value = values_of(levels.unflatten(-1, (-1, 4)), scale.float()[..., None], bits).flatten(-2)
    value = value[..., : 10 if turned else 7]
    assert torch.equal(value.mT if turned else value, parameter.detach())


def test_the_gradients_are_those_of_straight_through_rounding() -> None:
    """Against autograd of clamp and round with the rounding left out of the derivative."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 8))
    found = Latent(parameter, RoundedGrid(2, 4, torch.float32))
    found.scale *= 0.6  # some weights lie beyond the grid
    banks = Banks([found])
    banks.publish()
    gradient = torch.randn(6, 8)
    parameter.grad = gradient.clone()
    banks.collect()
    w, s = found.latent.clone().requires_grad_(), found.scale.clone().requires_grad_()
    unit = (w / s).clamp(-2.5, 2.5)
    step = values_of(levels_of(found.latent, found.scale, 2), torch.ones(()), 2)
    level = unit + (step - unit).detach()
    (level * s).flatten(-2).backward(gradient)
    within = (found.latent / found.scale).abs() < 2.5
    assert not bool(within.all())
    torch.testing.assert_close(found.latent.grad, w.grad)
    torch.testing.assert_close(found.scale.grad, s.grad)


def test_training_brings_the_rounded_layer_nearer_to_its_target() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(16, 32), torch.randn(256, 8) @ torch.randn(8, 32)
    layer = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    found = Latent(layer.weight, RoundedGrid(2, 16))
    banks = Banks([found])
    banks.publish()
    optimizer = torch.optim.Adam([{"params": [m], "lr": 0.01 * r} for m, r in found.masters])

    def loss() -> torch.Tensor:
        return (layer(x) - x @ weight.mT).square().mean()

    before = float(loss().detach())
    for _ in range(100):
        optimizer.zero_grad()
        loss().backward()
        banks.collect()
        optimizer.step()
        banks.publish()
    assert float(loss().detach()) < 0.5 * before
