"""Sums of many processes' tensors whose bits do not depend on how many processes there are."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.parallel.processes import Processes


class OrderedSum:
    """Σ part_n over n = 0, 1, …, added one after the other in this order, as one process adds them.

    The parts, of one shape and dtype, are dealt out in turn (`Processes.owns`). In every round each
    process gives its next one; slab s of the rows of all goes to process s, which adds them in order.

    Args:
        number: of parts in all. dtype: to add in (None: that of the parts).
    """

    def __init__(self, processes: Processes, number: int, dtype: torch.dtype | None = None) -> None:
        self.processes, self.number, self.dtype = processes, number, dtype
        self.done = 0  # parts added so far
        self.slab: Tensor | None = None
        self.like: tuple[torch.Size, torch.dtype] | None = None

    def add(self, part: Tensor | None) -> None:
        """One round, of all processes: this one's next part, None if it has no more."""
        processes = self.processes
        given = min(processes.count, self.number - self.done)
        for slab in processes.exchanged(self._cut(part))[:given]:
            wide = slab if self.dtype is None else slab.to(self.dtype)
            self.slab = wide.clone() if self.slab is None else self.slab.add_(wide)
        self.done += given

    def total(self) -> Tensor:
        """The sum, in every process."""
        processes = self.processes
        slabs = [
            processes.shared(self.slab if processes.rank == n else None, n)
            for n in range(processes.count)
        ]
        return slabs[0] if len(slabs) == 1 else torch.cat(slabs)

    def _cut(self, part: Tensor | None) -> list[Tensor]:
        """The slabs of `part`, or of zeros like the others', which are not added."""
        if self.like is None:  # the first process has a part in every round
            self.like = self.processes.told(None if part is None else (part.shape, part.dtype))
        if part is None:
            part = torch.zeros(self.like[0], dtype=self.like[1], device=self.processes.device)
        return list(part.tensor_split(self.processes.count))


def rounds(processes: Processes, number: int) -> range:
    """The rounds in which `number` items are dealt out."""
    return range(-(-number // processes.count))
