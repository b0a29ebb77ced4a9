"""A computation whose shapes never change as a CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blr.kernels.common.placing import on_gpu


class Replayed:
    """`compute` of one tensor, captured once it has run, with memory of its own.

    Raises RuntimeError where it does what no graph can hold, or where memory is short.
    """

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, ...]], given: Tensor) -> None:
        self.given = given.clone()
        with on_gpu(given.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                compute(self.given)  # on this stream libraries set themselves up
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    self.results = compute(self.given)
            torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, given: Tensor) -> tuple[Tensor, ...]:
        """The results for `given`, overwritten by the next call."""
        self.given.copy_(given)
        with on_gpu(given.device):
            self.graph.replay()
        return self.results
