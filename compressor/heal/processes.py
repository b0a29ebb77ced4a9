"""The processes of a run: one, or those that `accelerate launch` or `torchrun` started.

Every process has the whole model and its rows of each batch; gradients are summed. What is written
is written by the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from blr.compressor.machine.device import pick_device


class Processes:
    """This process's number `rank` of `count`, and what they do together. `device` is its own."""

    def __init__(self, device: str) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = pick_device(device)
        if self.count > 1:
            self.device = self._join()

    def _join(self) -> torch.device:
        from accelerate import PartialState

        state = PartialState(cpu=self.device.type == "cpu")
        self.rank, self.count = state.process_index, state.num_processes
        return state.device

    @property
    def first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def sum_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Replace the gradients of `tensors` by their sums over the processes, in one message."""
        if self.count == 1:
            return
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def sum(self, value: Tensor) -> Tensor:
        """Over the processes."""
        if self.count > 1:
            dist.all_reduce(value)
        return value

    def agreed(self, *values: float) -> list[float]:
        """The first process's `values`, in all of them."""
        if self.count == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return shared.tolist()
