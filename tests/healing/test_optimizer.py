"""The optimizer of healing: moments that are there before the first step, and copies that are reused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blr.compressor.healing.optimizer import BETAS, make_optimizer, set_rates
from blr.compressor.healing.student_and_teacher import Pair

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


def test_copies_of_masters_are_written_into_earlier_ones() -> None:
    master = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    pair: Any = SimpleNamespace(masters={"a": master})
    first = Pair.values(pair)
    assert torch.equal(first["a"], master) and first["a"].is_contiguous()
    master.data += 1
    assert not torch.equal(first["a"], master), "no view of it"
    again = Pair.values(pair, first)
    assert again["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(again["a"], master) and not again["a"].requires_grad
