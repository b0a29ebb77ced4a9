"""What a calibrated compression works on, and what is done of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.fitting.batches import Batch
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import Job, Result
from blr.compressor.fitting.sensitivity import Sensitivity
from blr.compressor.fitting.work import Work
from blr.compressor.planning.plan import Plan

if TYPE_CHECKING:
    from blr.compressor.fitting.student import Student


@dataclass
class Run:
    """One calibrated compression: what is fitted, from what, and what is done so far.

    `epochs` are those of a block's refit, `finish` of the whole model's, for which its `students` are
    kept; `prefix` is the digest of the calibration and of every layer finished so far, `norms` are those
    that were trained, by tensor.
    """

    work: Work
    model: BlockModel
    plan: Plan
    batches: list[Batch]
    sensitivity: Sensitivity | None
    epochs: int
    prefix: str
    finish: int = 0
    students: list[Student] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    norms: dict[str, TensorEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = {planned.layer.module: planned for planned in self.plan.layers}

    def job(self, module: str) -> Job:
        return Job(self.planned[module], self.work.recipe, self.model.device)

    @property
    def mine(self) -> dict[int, Batch]:
        """The batches of this process, by number."""
        return {n: batch for n, batch in enumerate(self.batches) if self.work.processes.owns(n)}
