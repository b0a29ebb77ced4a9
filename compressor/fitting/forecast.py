"""What a compression takes, predicted from headers alone: time, memory of GPUs and host, disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blr.compressor.base.processes import share_out
from blr.compressor.base.progress import duration
from blr.compressor.base.tables import amount
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.memory_forecast import disk_bytes, room
from blr.compressor.fitting.time_forecast import Work, phases
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.roofline import Gpu
from blr.compressor.recipe.schema import Recipe

TOGETHER = 0.85  # of the speed that as many GPUs would have apart
ALONE = ("libraries and the rest", "reading, writing and the check")  # what one process does


@dataclass(frozen=True)
class Fits:
    """Of a run on `gpus` GPUs of `room` bytes each: seconds by what they go into; bytes of each GPU that
    it needs (`memory`), and those that it takes where they are there; bytes of the host, and on disk."""

    phases: dict[str, float]
    memory: float
    taken: float
    host: float
    disk: float
    gpus: int
    room: float

    @property
    def seconds(self) -> float:
        """From start to verified output."""
        return sum(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.memory <= self.room


def planned(
    source: Source, plan: Plan, recipe: Recipe, gpu: Gpu, gpus: int, calibrated: bool
) -> dict[str, Any]:
    """What compressing by `plan` would take, JSON-ready; `said` is one line."""
    found = forecast(Work(source, plan, recipe, gpu, calibrated), gpus)
    told = {"seconds": found.seconds, "fits": found.fits, "said": words(found, gpu.name)}
    return asdict(found) | told


def forecast(work: Work, gpus: int = 1) -> Fits:
    """Of a run on so many GPUs, which share out fits, and batches of a calibration."""
    found = phases(work)
    if gpus > 1:
        shared = {name: s / (gpus * TOGETHER) for name, s in found.items() if name not in ALONE}
        found |= shared if work.calibrated else {"fits": _longest(work, gpus) / TOGETHER}
    size, whole = room(work, gpus), work.gpu.memory_gb * 1e9
    taken = min(size.taken, whole)
    return Fits(found, size.needed, max(taken, size.needed), size.host, disk_bytes(work), gpus, whole)


def _longest(work: Work, gpus: int) -> float:
    """Seconds of the GPU that has most to fit, where layers are shared out."""
    costs = [work.layer_seconds(layer) for layer in work.plan.layers]
    loads = [0.0] * gpus
    for owner, cost in zip(share_out(costs, gpus), costs, strict=True):
        loads[owner] += cost
    return max(loads)


def words(found: Fits, gpu: str) -> str:
    """One line that says it."""
    each = gpu if found.gpus == 1 else f"each of {found.gpus} {gpu}"
    need = f"{amount(found.memory)} of the {found.room / 1e9:,.0f} of {each}"
    if not found.fits:
        return f"compressing does not fit: {need}; take a larger --gpu or --device cpu"
    if found.taken > 1.1 * found.memory:
        need += f" needed, {amount(found.taken)} taken where free"
    beside = f"{amount(found.host)} of the host, {amount(found.disk)} of disk"
    return f"compressing: about {duration(found.seconds)}; {need}; {beside} (predicted)"
