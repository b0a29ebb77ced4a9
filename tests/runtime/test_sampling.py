"""Tokens are drawn from the distribution that transformers would draw from, and arrive in order."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from blr.compressor.runtime.sampling import Collector, Sampler

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_same_distribution_as_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits).softmax(-1)
    found = Sampler(temperature, top_k, top_p).probabilities(logits)
    assert torch.allclose(found / found.sum(-1, keepdim=True), expected, atol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(20000, 1)
    drawn = Sampler(1.0).choose(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    # four standard deviations of a share of 20000 draws
    assert float((shares - logits[0].exp()).abs().max()) < 4 * (0.25 / 20000) ** 0.5


@pytest.mark.parametrize(("name", "value"), [("temperature", -0.1), ("top_k", 0), ("top_p", 1.5)])
def test_values_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} {value}"):
        Sampler(**{name: value})


def test_collector_keeps_each_row_up_to_its_stop() -> None:
    seen: list[tuple[int, int]] = []
    collector = Collector(2, 4, {9}, lambda row, token: seen.append((row, token)))
    for step in ([1, 2], [9, 3], [4, 9]):
        assert not collector.done
        collector.push(torch.tensor(step))
    assert collector.done
    collector.push(torch.tensor([5, 5]))
    assert collector.finish() == [[1, 9], [2, 3, 9]]
    assert seen == [(0, 1), (1, 2), (0, 9), (1, 3), (1, 9)]
