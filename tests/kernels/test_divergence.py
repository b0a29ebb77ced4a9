"""The divergence of rows of logits and its gradient by one kernel, against log-softmaxes in float64."""

from __future__ import annotations

import pytest
import torch
from compiling import compile_for
from torch.nn.functional import log_softmax

from blr.compressor.healing.objective import Readout, kl, summed
from blr.kernels.training import divergence as kernel
from blr.kernels.training.losses import divergence_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 64, 150])
def test_it_is_that_of_torch(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that some blocks make larger, and of tokens that one side all but rules out, or both
    rule out."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    torch.manual_seed(width)
    student, teacher = (4 * torch.randn(6, width) for _ in range(2))
    student[1] += 90 * torch.arange(width) / width
    teacher[2, 0] = -3e4
    teacher[3], student[3, -1] = student[3], -3e4
    if width > 64:
        student[4, :64] = teacher[4, :64] = -torch.inf  # all of the first block
    student, teacher = student.to(dtype), teacher.to(dtype)
    log_q = log_softmax(student.double().requires_grad_(), -1)
    log_p = log_softmax(teacher.double(), -1)
    expected = torch.where(log_p.isinf(), 0, log_p.exp() * (log_p - log_q)).sum(-1)
    lost, gradient = kernel.divergence(student, teacher)
    torch.testing.assert_close(lost.double(), expected.detach(), rtol=1e-4, atol=1e-4)
    wanted = (log_q.exp() - log_p.exp()).detach()
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-2, atol=1e-5)


def test_a_loss_in_parts_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    teacher, targets = (torch.randn(7, 11), Readout(None)), torch.zeros(7, dtype=torch.long)
    expected = summed(hidden, Readout(weight), teacher, targets, kl)
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    calls = []

    def counted(*logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        return divergence(*logits)

    divergence = kernel.divergence
    monkeypatch.setattr(kernel, "divergence", counted)
    monkeypatch.setenv("BLR_KERNELS", "triton")
    found = summed(hidden, Readout(weight), teacher, targets, kl)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, (hidden, weight)), wanted)
    assert calls


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_it_compiles(capability: int) -> None:
    signature = {"student": "*bf16", "teacher": "*bf16", "lost": "*fp32", "gradient": "*bf16"}
    found = compile_for(
        "blr.kernels.training.divergence",
        "divergence_kernel",
        {**signature, "width": "i32"},
        {"BLOCK": kernel.BLOCK},
        capability,
        num_warps=kernel.WARPS,
    )
    assert found["spills"] == 0


def test_a_multiple_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the sum alone, whose gradient is not multiplied."""
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 9, requires_grad=True), torch.randn(6, 9)
    (expected,) = torch.autograd.grad(0.25 * divergence_sum(student, teacher), student)
    monkeypatch.setenv("BLR_KERNELS", "triton")
    (found,) = torch.autograd.grad(0.25 * divergence_sum(student, teacher), student)
    (alone,) = torch.autograd.grad(divergence_sum(student, teacher, alone=True), student)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(0.25 * alone, expected)
