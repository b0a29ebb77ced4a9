"""CUDA graphs are captured and replayed, on any GPU, whatever becomes of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.placing import on_gpu_of


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph` on the current GPU's stream for it: torch's own is of the GPU that was captured
    on first, and on another a graph would be empty. Where it fails, torch's generator is left waiting
    for it, and every random number drawn on the GPU from then on would be an error: it goes on from its
    state before."""
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=_capture_stream(device), **options):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: graphs that share a pool share memory of the same stream alone."""
    return torch.cuda.Stream(device)


@contextmanager
def own_stream() -> Iterator[torch.cuda.Stream]:
    """A stream of its own for what runs before a capture; what follows waits for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


class Captured:
    """What `compute` launches for `inputs` as a CUDA graph: one launch in place of hundreds.

    It has run before, so that libraries are set up and kernels compiled. Results lie in memory of the
    graph's own, and the next call overwrites them. A graph knows addresses alone: whoever has it holds
    the other tensors that `compute` takes.

    Args:
        pool: memory that graphs share, of which one is replayed at a time.

    Raises RuntimeError where `compute` does what no graph can hold, or where memory is short.
    """

    def __init__(self, compute: Callable[..., object], *inputs: Tensor, pool: object = None) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, those of NCCL too, may go on meanwhile
        with on_gpu_of(inputs), capturing(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.results = compute(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """The results for `inputs`."""
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        with on_gpu_of(self.inputs):
            self.graph.replay()
        return self.results
