"""What every fit of one compression is done with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from blr.compressor.base.processes import Processes, share_out
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import Source
from blr.compressor.recipe.schema import Recipe
from blr.compressor.workspace.journal import Journal


@dataclass(frozen=True)
class Work:
    """The weights, the recipe, and where finished layers are kept.

    device: torch's name of one, or "auto". offline: texts come from no hub.
    """

    source: Source
    recipe: Recipe
    journal: Journal
    progress: Progress
    device: str = "auto"
    offline: bool = False

    @cached_property
    def processes(self) -> Processes:
        """Those of this run. Raises as `Processes`."""
        return Processes(self.device)

    @property
    def target(self) -> torch.device:
        """The device to compute on."""
        return self.processes.device

    def missing(self, keys: list[str]) -> list[str]:
        """Those of `keys` that the journal has nothing under; the same in all processes."""
        lacking = self.processes.first and [key for key in keys if self.journal.load(key) is None]
        return self.processes.told(lacking)

    def share(self, costs: Mapping[str, float], compute: Callable[[str], None]) -> None:
        """Have every key in the journal: `compute` stores what is under one; each process computes some,
        by their predicted costs."""
        owners = share_out(list(costs.values()), self.processes.count)
        for key, owner in zip(costs, owners, strict=True):
            if owner == self.processes.rank:
                compute(key)
        self.processes.wait()
        self.journal.await_all(list(costs))
