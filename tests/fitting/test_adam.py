"""Our Adam is torch's, with a rate for every tensor."""

from __future__ import annotations

import torch

from blr.compressor.fitting.adam import Adam, factor_at, rates_of


def test_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)]
    theirs = [tensor.clone() for tensor in mine]
    rates = rates_of(mine, [1.0, 0.3], 0.01)
    assert rates[1] == 0.003 * float(theirs[1].square().mean().sqrt())
    groups = [{"params": [t], "lr": rate} for t, rate in zip(theirs, rates, strict=True)]
    expected = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(expected, lambda step: factor_at(step, 6, 2))
    found = Adam(mine, rates)
    for step in range(5):
        gradients = [torch.randn(t.shape, generator=generator) for t in mine]
        for tensor, gradient in zip(theirs, gradients, strict=True):
            tensor.grad = gradient.clone()
        expected.step()
        schedule.step()
        found.move(gradients, factor_at(step, 6, 2))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
