"""A computation whose shapes never change as a CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blr.kernels.common.capturing import capturing
from blr.kernels.common.placing import on_gpu


class Replayed:
    """`compute` of one tensor, captured; it has run before, so that libraries are set up and kernels
    compiled. What it makes stays in memory of the graph's own.

    Raises RuntimeError where it does what no graph can hold, or where memory is short.
    """

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, ...]], given: Tensor) -> None:
        self.given, self.graph = given.clone(), torch.cuda.CUDAGraph()
        with on_gpu(given.device), capturing(self.graph, capture_error_mode="thread_local"):
            self.results = compute(self.given)

    def __call__(self, given: Tensor) -> tuple[Tensor, ...]:
        """The results for `given`, overwritten by the next call."""
        self.given.copy_(given)
        with on_gpu(given.device):
            self.graph.replay()
        return self.results
