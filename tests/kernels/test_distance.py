"""The relative distance of rows of states and its gradient, against float64."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.healing.objective import missed_states
from blr.kernels.training.losses import relative_errors


def exact(mine: Tensor, wanted: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and the gradient of ``(distances ⊙ g).sum()``."""
    h = mine.detach().double().requires_grad_()
    found = (h - wanted.double()).square().sum(-1) / wanted.double().square().sum(-1).clamp_min(1e-12)
    return found.detach(), torch.autograd.grad((found * g.double()).sum(), h)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_that_of_float64(dtype: torch.dtype) -> None:
    """Of states of two dtypes, of the same ones, and of zeros."""
    torch.manual_seed(0)
    mine, wanted = torch.randn(2, 3, 40).to(dtype).requires_grad_(), torch.randn(2, 3, 40).bfloat16()
    with torch.no_grad():
        mine[0, 1] = wanted[0, 1]
    g = torch.rand(2, 3)
    found, (distances, gradient) = relative_errors(mine, wanted), exact(mine, wanted, g)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), distances, rtol=1e-5, atol=1e-6)
    made = torch.autograd.grad((found * g).sum(), mine)[0]
    assert made.dtype == dtype
    assert float((made - gradient).norm() / gradient.norm()) < TOLERANCES[dtype]
    zeros = torch.zeros(3, 5)
    assert torch.equal(relative_errors(zeros, zeros), torch.zeros(3))


def test_a_loss_takes_it() -> None:
    """Gradients of a sum come as one number that all tokens share."""
    torch.manual_seed(0)
    ours, theirs = (tuple(torch.randn(2, 3, 7) for _ in range(2)) for _ in range(2))
    mine = tuple(state.requires_grad_() for state in ours)
    given = torch.autograd.grad(missed_states(mine, theirs), mine)
    for state, other, found in zip(mine, theirs, given, strict=True):
        gradient = exact(state, other, torch.ones(2, 3))[1] / 2
        assert float((found - gradient).norm() / gradient.norm()) < 1e-5
