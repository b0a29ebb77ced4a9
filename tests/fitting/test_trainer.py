"""The training loop: Adam is torch's with a rate for every tensor, masters are copied and put back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blr.compressor.fitting.refit import rates_of
from blr.compressor.fitting.trainer import BETAS, MOMENTS, Adam, TrainedSet, TrainingLoop
from blr.compressor.structures.latent import Plain

pytestmark = pytest.mark.fast


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_steps_are_those_of_torch() -> None:
    mine = drawn((3, 4), (5,))
    theirs = [tensor.clone() for tensor in mine]
    rates = rates_of(mine, [1.0, 0.3], 0.01)
    assert rates[1] == 0.003 * float(theirs[1].square().mean().sqrt())
    groups = [{"params": [t], "lr": rate} for t, rate in zip(theirs, rates, strict=True)]
    expected = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(expected, lambda step: 1 / (step + 1))
    found = Adam(mine, rates)
    for step in range(5):
        gradients = [torch.randn(t.shape) for t in mine]
        for tensor, gradient in zip(theirs, gradients, strict=True):
            tensor.grad = gradient.clone()
        expected.step()
        schedule.step()
        found.move(gradients, 1 / (step + 1))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


def test_one_kernel_for_all_tensors_of_a_rate_moves_them_alike() -> None:
    apart = drawn((3, 4), (5,), (2,))
    together = [tensor.clone() for tensor in apart]
    plain, fused = Adam(apart, [0.1, 0.2, 0.1]), Adam(together, [0.1, 0.2, 0.1], fused=True)
    for last in (None, torch.ones(2), torch.ones(2)):
        gradients = [torch.ones(3, 4), -torch.ones(5), last]
        plain.move(gradients, 0.5)
        fused.move(gradients, 0.5)
    torch.testing.assert_close(apart, together)


def test_what_has_no_gradient_stays_and_its_steps_are_not_counted() -> None:
    """As torch leaves it, so that its moments begin with its first gradient."""
    mine, gradient = drawn((2, 2), (2, 2)), torch.ones(2, 2)
    theirs = [nn.Parameter(tensor.clone()) for tensor in mine]
    found, expected = Adam(mine, [0.1, 0.1]), torch.optim.AdamW(theirs, 0.1, BETAS, weight_decay=0.0)
    for second in (None, -gradient, 2 * gradient):
        found.move([gradient, second], 1.0)
        theirs[0].grad, theirs[1].grad = gradient.clone(), second
        expected.step()
        assert all(map(torch.equal, mine, theirs))
    for parameter, kept in zip(theirs, found.moments(), strict=True):
        assert all(torch.equal(kept[name], expected.state[parameter][name]) for name in MOMENTS)


def test_moments_are_there_before_the_first_step_and_go_on_elsewhere() -> None:
    start, gradient = drawn((5, 3))[0], torch.ones(5, 3)
    one, other = start.clone(), start.clone()
    first = Adam([one], [0.01])
    assert all(float(value.sum()) == 0 for value in first.moments()[0].values())
    first.move([gradient], 1.0)
    second = Adam([other], [0.01])
    other.copy_(one)
    second.load(first.moments())
    for adam in (first, second):
        adam.move([-2 * gradient], 0.5)
    assert torch.equal(one, other) and not torch.equal(one, start)


def test_copies_of_masters_are_written_into_earlier_ones() -> None:
    master = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    held = TrainedSet({"a": Plain(master)})
    first = held.values()
    assert torch.equal(first["a"], master) and first["a"].is_contiguous()
    master.data += 1
    assert not torch.equal(first["a"], master), "no view of it"
    again = held.values(first)
    assert again["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(again["a"], master) and not again["a"].requires_grad


class Away(TrainingLoop):
    """Moves a number up for three steps; `figures` say how good each state is."""

    def __init__(self, figures: list[float]) -> None:
        self.number, self.figures = nn.Parameter(torch.ones(1)), iter(figures)
        super().__init__(TrainedSet({"x": Plain(self.number)}), [1.0], "cpu")

    def is_over(self) -> bool:
        return self.state.step == 3

    def factor(self) -> float:
        return 1.0

    def backward(self) -> None:
        (-self.number).sum().backward()

    def judge(self) -> float:
        return next(self.figures)

    def after_step(self) -> None:
        self.consider()


@pytest.mark.parametrize(
    ("figures", "best"), [([3, 2, 1, 2], 2), ([1, 2, 1, 3], 0), ([float("nan"), 1, 1, 1], 0)]
)
def test_the_best_state_is_put_back(figures: list[float], best: int) -> None:
    loop = Away(figures)
    loop.train()
    assert loop.state.best_step == best and loop.number.item() == pytest.approx(1 + best)
