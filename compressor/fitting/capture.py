"""Forward and backward passes of one shape as a CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from blr.compressor.fitting.batches import Batch, same
from blr.kernels.common.capturing import capturing

WARM_UP = 2  # eager passes before a capture: libraries set themselves up in the first


class Captured:
    """`passes` of `inputs`, which leave gradients in `parameters`, to be replayed with other inputs.

    Raises RuntimeError where they do what no graph can hold.
    """

    def __init__(
        self,
        passes: Callable[..., None],
        parameters: Sequence[nn.Parameter],
        inputs: Sequence[Tensor],
    ) -> None:
        self.parameters, self.inputs = parameters, [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._forget()
                passes(*self.inputs)
            self._forget()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, capture_error_mode="thread_local"):  # NCCL has threads too
            passes(*self.inputs)
        self.gradients = [parameter.grad for parameter in parameters]
        self._forget()

    def replay(self, *inputs: Tensor) -> None:
        """Leave the gradients for `inputs`, in memory that the next replay writes to."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def alike(batches: Sequence[Batch]) -> list[bool]:
    """Which batches differ from the first in their hidden states alone: all of their tokens are real,
    as many, and the blocks' other arguments are the same."""
    first = batches[0]
    return [
        bool(batch.mask.all())
        and batch.mask.shape == first.mask.shape
        and same(batch.arguments, first.arguments)
        and batch.kinds == first.kinds
        for batch in batches
    ]
