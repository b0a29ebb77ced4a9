"""Experts that fits and training run by stacks of weights: what they compute is what each computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import save_pico
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor.fitting import experts
from blr.compressor.fitting.experts import Joined, StackedExperts, seats_of, watched_experts
from blr.compressor.fitting.refit import rates_of
from blr.compressor.fitting.trainer import Adam, TrainedSet
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.structures.latent import Latent, RoundedGrid

TYPES = ("mixtral", "qwen3-moe", "gpt-oss", "granite-moe")  # with biases and transposed, too
PARTS: list[dict[str, list[str]]] = [
    {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]},
    {"gate_up_proj": ["gate_up_proj"]},
    {"down_proj": ["down_proj"]},
]


def native_experts(name: str, folder: Path) -> Any:
    """The last experts of a pico model, with large numbers in all that they hold."""
    model = AutoModelForCausalLM.from_pretrained(save_pico(name, folder), dtype=torch.float32)
    found = [module for module in model.modules() if hasattr(module, "gate_up_proj")][-1]
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def passed(made: Experts, x: Tensor, chosen: Tensor, shares: Tensor) -> list[Tensor | None]:
    """The output of experts, and its gradients to tokens and shares."""
    given = [x.clone().requires_grad_(), shares.clone().requires_grad_()]
    y = made(given[0], chosen, given[1])
    y.square().sum().backward()
    return [y.detach(), *(tensor.grad for tensor in given)]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(parts))
@pytest.mark.parametrize("name", TYPES)
def test_stacked_as_one_by_one(
    name: str, parts: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no token chose some experts, and where these stand alone among those run at once."""
    monkeypatch.setattr(experts, "AT_ONCE", 3)
    native = native_experts(name, tmp_path)
    count, shape = native.num_experts, native.gate_up_proj.shape
    width = shape[1] if getattr(native, "is_transposed", False) else shape[2]
    chosen = torch.stack([torch.randperm(count - 1)[:2] for _ in range(17)])
    given = torch.randn(17, width), chosen, torch.rand(17, 2)
    found = [passed(kind(copy.deepcopy(native), parts), *given) for kind in (Experts, StackedExperts)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_rows_are_those_of_tokens_and_zeros(tmp_path: Path) -> None:
    """What fits measure of an expert is of its tokens alone, in spite of a bias."""
    made = StackedExperts(native_experts("gpt-oss", tmp_path), PARTS[0])
    x, chosen = torch.randn(9, 32), torch.tensor([[0, 2]] * 4 + [[2, 1]] * 5)
    outer = torch.nn.Sequential(made)
    with watched_experts(outer) as kept:
        made(x, chosen, torch.ones(9, 2))
    seats, rows = kept["0.w2", "in"]
    own = made.stage(
        "gate_up_proj", seats_of(chosen[:4], made.count).spread(x[:4]), seats_of(chosen[:4], 4)
    )
    first = own[:4]
    torch.testing.assert_close(seats.gram(rows, rows)[0], first.mT @ first)
    assert seats.counts.tolist() == [4, 5, 9, 0] and not seats.gram(rows, rows)[3].any()


def latents(count: int) -> list[Latent]:
    """Parameters of different sizes that are trained rounded."""
    drawn = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 64, generator=drawn) * 10.0**-n for n in range(count)]
    return [Latent(torch.nn.Parameter(value), RoundedGrid(2, 32)) for value in values]


def test_joined_layers_are_trained_as_each() -> None:
    """Each keeps its own rate, and holds what was trained."""
    apart, together = latents(3), latents(3)
    one = Joined([{"weight": part} for part in together]).parts["weight"]
    sets = TrainedSet({str(n): part for n, part in enumerate(apart)}), TrainedSet({"": one})
    gradient = torch.randn(3, 6, 64)
    for what in sets:
        rates = rates_of([*what.masters.values()], what.shares, 0.01, what.stacks)
        steps = Adam([*what.masters.values()], rates)
        for _ in range(3):
            what.publish()
            of_each = gradient if len(what.parameters) > 1 else [gradient]
            for parameter, own in zip(what.parameters, of_each, strict=True):
                parameter.grad = own.clone()
            what.collect()
            steps.move([master.grad for master in what.masters.values()], 1.0)
            what.forget()
        what.publish()
    for alone, member in zip(apart, together, strict=True):
        torch.testing.assert_close(member.full(), alone.full())
        torch.testing.assert_close(member.parameter, alone.parameter)
