"""Sums of many processes' tensors whose bits do not depend on how many processes there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from blr.compressor.base.processes import Processes


class OrderedSum:
    """Σ part_n over n = 0, 1, …, added one after the other in this order, as one process adds them.

    The parts, of one shape and dtype, are dealt out in turn (`Processes.owns`). In every round each
    process gives its next one; slab s of the rows of all goes to process s, which adds them in order.

    Args:
        number: of parts in all. dtype: to add in (None: that of the parts). like: a tensor of the parts'
            shape and dtype; without one the first process tells the others.
    """

    def __init__(
        self,
        processes: Processes,
        number: int,
        dtype: torch.dtype | None = None,
        like: Tensor | None = None,
    ) -> None:
        self.processes, self.number, self.dtype = processes, number, dtype
        self.done = 0  # parts added so far
        self.slab: Tensor | None = None
        self.like = None if like is None else (like.shape, like.dtype)

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
        assert self.like is not None
        shape, kind = self.like
        count, rank = self.processes.count, self.processes.rank
        if count == 1:
            assert self.slab is not None
            return self.slab
        heights = [len(rows) for rows in torch.empty(shape[0]).tensor_split(count)]
        described = [((height, *shape[1:]), self.dtype or kind) for height in heights]
        spread = self.processes.spread
        return torch.cat(
            [spread(self.slab if rank == n else None, n, *described[n]) for n in range(count)]
        )

    def _cut(self, part: Tensor | None) -> list[Tensor]:
        """The slabs of `part`, or of zeros like the others', which are not added."""
        if self.like is None:  # the first process has a part in every round
            self.like = self.processes.told(None if part is None else (part.shape, part.dtype))
        if part is None:
            part = torch.zeros(self.like[0], dtype=self.like[1], device=self.processes.device)
        return list(part.tensor_split(self.processes.count))


Name = TypeVar("Name")


def sum_in_order(
    processes: Processes,
    number: int,
    parts: Callable[[int], Mapping[Name, Tensor]],
    names: Iterable[Name],
    dtype: torch.dtype | None = None,
) -> dict[Name, Tensor]:
    """Σ over n of what `parts(n)` has under each of `names`, as of `OrderedSum`; every process asks for
    its own parts alone."""
    sums = {name: OrderedSum(processes, number, dtype) for name in names}
    for turn in rounds(processes, number):
        n = turn * processes.count + processes.rank
        found = parts(n) if n < number else {}
        for name, total in sums.items():
            total.add(found.get(name))
    return {name: total.total() for name, total in sums.items()}


def rounds(processes: Processes, number: int) -> range:
    """The rounds in which `number` items are dealt out."""
    return range(-(-number // processes.count))
