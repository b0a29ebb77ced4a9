"""Healing's divergence by one kernel, on the GPU and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.healing.objective import Readout, kl, summed

pytestmark = pytest.mark.gpu
ROWS, WIDTH, VOCABULARY = 300, 64, 49152


def test_it_is_that_of_torch(on_cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made = (torch.randn(n, WIDTH, device=on_cuda) for n in (ROWS, ROWS, VOCABULARY))
    hidden, theirs, weight = (x.bfloat16().requires_grad_() for x in made)
    targets = torch.zeros(ROWS, dtype=torch.long, device=on_cuda)

    def run() -> tuple[torch.Tensor, ...]:
        loss = summed(hidden, Readout(weight), (theirs.detach(), Readout(weight.detach())), targets, kl)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    monkeypatch.setenv("BLR_KERNELS", "torch")
    expected = run()
    monkeypatch.delenv("BLR_KERNELS")
    for found in (run(), captured(run)):
        for ours, wanted in zip(found, expected, strict=True):
            assert float((ours - wanted).norm() / wanted.norm()) < 1e-2


def captured(run: object) -> tuple[torch.Tensor, ...]:
    """The results of a CUDA graph of `run`."""
    assert callable(run)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    return found
