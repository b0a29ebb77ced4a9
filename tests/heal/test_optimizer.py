"""The optimizer of healing: moments that are there before the first step, and copies that are reused."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.heal.optimizer import BETAS, make_optimizer, set_rates

pytestmark = pytest.mark.fast


def test_moments_are_there_before_the_first_step_and_change_nothing() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(5, 3), torch.randn(5, 3)
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    found = make_optimizer([ours], 0.01, [1.0], [1.0])
    assert all(value.sum() == 0 for value in found.state[ours].values())
    set_rates(found, 1.0)
    rate = found.param_groups[0]["lr"]
    plain = torch.optim.AdamW([torchs], lr=rate, betas=BETAS, weight_decay=0.0)
    for scale in (1.0, -2.0, 0.5):
        for tensor, optimizer in ((ours, found), (torchs, plain)):
            tensor.grad = scale * gradient
            optimizer.step()
        assert torch.equal(ours, torchs)
    for name, value in plain.state[torchs].items():
        assert torch.equal(found.state[ours][name], value)
