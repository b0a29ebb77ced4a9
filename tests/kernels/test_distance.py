"""The relative distance of rows of states and its gradient by one kernel each, against torch."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.healing.objective import missed_states
from blr.kernels.training import distance as kernel
from blr.kernels.training import losses as reference
from blr.kernels.training.losses import relative_errors


def exact(mine: Tensor, wanted: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and the gradient of ``(distances ⊙ g).sum()``."""
    h = mine.detach().double().requires_grad_()
    found = (h - wanted.double()).square().sum(-1) / wanted.double().square().sum(-1).clamp_min(1e-12)
    return found.detach(), torch.autograd.grad((found * g.double()).sum(), h)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 13, 40, 64])
def test_it_is_that_of_torch(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poison: None
) -> None:
    """Of rows that fill no block, that take some, and of zeros; of states that lie apart."""
    monkeypatch.setattr(kernel, "WIDEST", 16)
    monkeypatch.setattr(kernel, "TILE", 64)
    torch.manual_seed(width)
    mine, wanted = torch.randn(2, 2, 3, width + 2).to(dtype)[..., :width]
    wanted[0, 1] = mine[0, 1]
    g = torch.rand(2, 3)
    distances, gradient = exact(mine, wanted, g)
    found, size = kernel.distances(mine, wanted)
    assert found.dtype == size.dtype == torch.float32 and found.shape == size.shape == (2, 3)
    torch.testing.assert_close(found.double(), distances, rtol=1e-5, atol=1e-6)
    made = kernel.distances_back(mine, wanted, size, g)
    assert made.dtype == dtype and made.shape == mine.shape
    assert float((made - gradient).norm() / gradient.norm()) < TOLERANCES[dtype]
    plain = reference.distances(mine, wanted)
    torch.testing.assert_close((found, size), plain)
    torch.testing.assert_close(reference.distances_back(mine, wanted, size, g), made)


def test_of_two_dtypes_of_nothing_and_of_zeros() -> None:
    mine, wanted = torch.randn(3, 5), torch.randn(3, 5).bfloat16()
    torch.testing.assert_close(kernel.distances(mine, wanted), reference.distances(mine, wanted))
    zeros = torch.zeros(3, 5)
    torch.testing.assert_close(kernel.distances(zeros, zeros)[0], torch.zeros(3))
    for empty in (torch.zeros(0, 5), torch.zeros(2, 0)):
        found, size = kernel.distances(empty, empty)
        assert kernel.distances_back(empty, empty, size, found).shape == empty.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_takes_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a sum come as one number that all tokens share."""
    torch.manual_seed(0)
    ours, theirs = (tuple(torch.randn(2, 3, 7).to(dtype) for _ in range(2)) for _ in range(2))
    mine = tuple(state.requires_grad_() for state in ours)
    calls, run = [], kernel.distances_back

    def counted(*given: Tensor) -> Tensor:
        calls.append(given[3].stride())
        return run(*given)

    monkeypatch.setattr(kernel, "distances_back", counted)
    expected = missed_states(mine, theirs)
    wanted = torch.autograd.grad(5 * expected, mine)
    assert not calls, "on a CPU torch computes"
    monkeypatch.setenv("BLR_KERNELS", "triton")
    found = missed_states(mine, theirs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(5 * found, mine), wanted)
    assert calls == [(0, 0)] * 2
    weight = torch.rand(2, 3)
    given = torch.autograd.grad((relative_errors(mine[0], theirs[0]) * weight).sum(), mine[0])[0]
    gradient = exact(mine[0], theirs[0], weight)[1]
    assert float((given - gradient).norm() / gradient.norm()) < TOLERANCES[dtype]


CAPABILITIES = [80, pytest.param(90, marks=pytest.mark.slow)]


@pytest.mark.parametrize("width", [576, 4096])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_they_compile(capability: int, width: int) -> None:
    constants = kernel._blocks(torch.empty(1, width))
    signature = {"mine": "*bf16", "wanted": "*bf16", "size": "*fp32", "n": "i32", "width": "i32"}
    more = {
        "distance_kernel": {"found": "*fp32", "least": "fp32"},
        "distance_back_kernel": {"g": "*fp32", "made": "*bf16", "g_row": "i32"},
    }
    for name, own in more.items():
        found = compile_for(
            "blr.kernels.training.distance",
            name,
            {**signature, **own},
            constants,
            capability,
            num_warps=kernel.WARPS,
        )
        assert found["spills"] == 0
