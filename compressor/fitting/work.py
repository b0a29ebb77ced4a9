"""What every fit of one compression is done with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from blr.compressor.checkpoint.journal import Journal
from blr.compressor.checkpoint.source import Source
from blr.compressor.machine.device import pick_device
from blr.compressor.progress import Progress
from blr.compressor.recipe.schema import Recipe


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
    def target(self) -> torch.device:
        """The device to compute on. Raises CapabilityError for one there is not."""
        return pick_device(self.device)
