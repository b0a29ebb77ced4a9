"""What a compression takes, predicted from headers alone: time and memory of every GPU.

Constants are fitted to what was measured on one H200 (`scripts/LOG.md`): seconds of an 8B decoder layer
("activations inside products …": q 5.9, gate 12.0, down 19.5), memory of a 7B one ("calibrated
compression": q 1.7 GiB, up 2.9, down 5.0, before V'H was held), and the seconds that a singular value
decomposition takes there; other GPUs are taken to be as much faster as their matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blr.compressor.fitting.cost import predicted_cost
from blr.compressor.parallel.shares import share_out
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.planning.roofline import Gpu
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.blast import SPREAD_BYTES
from blr.compressor.structures.specs import BlastSpec, families

DESCENT, DECOMPOSITION = 0.033, 0.0012  # of the ceiling of bf16 products that fits in float32 reach
PASSES = 0.03  # the same, of calibration's passes in float32
TIMES = 6  # a token goes through a block: dense, student, statistics, and three times a step of refit
MOMENT, FACTOR, FIXED = 22.0, 92.0, 0.7e9  # bytes: times i², times the factors' numbers, and in any case
EACH, CALIBRATED = 0.1, 1.0  # seconds a layer takes however small, the latter with its statistics
SINGLE = 4  # bytes of a float32 number
TOGETHER = 0.85  # of the speed that as many GPUs would have apart


@dataclass(frozen=True)
class Fits:
    """Seconds of a run on `gpus` GPUs, without reading and writing, and bytes on each at most."""

    seconds: float
    memory: float
    gpus: int
    room: float

    @property
    def fits(self) -> bool:
        return self.memory <= self.room


def planned(plan: Plan, recipe: Recipe, gpu: Gpu, gpus: int, calibrated: bool) -> dict[str, Any]:
    """What compressing by `plan` would take, JSON-ready; `said` is one line."""
    found = forecast(plan.layers, recipe, gpu, gpus, calibrated)
    return {**asdict(found), "fits": found.fits, "said": words(found, gpu.name)}


def forecast(
    layers: Sequence[PlannedLayer], recipe: Recipe, gpu: Gpu, gpus: int, calibrated: bool
) -> Fits:
    """Of fits shared out over the GPUs, and of calibration's passes if there is one."""
    costs = [_seconds(layer, gpu, calibrated) for layer in layers]
    if calibrated:  # the largest are fitted together, batches are shared out
        seconds = (sum(costs) + _passes(layers, recipe, gpu)) / gpus
    else:
        loads = [0.0] * gpus
        for owner, cost in zip(share_out(costs, gpus), costs, strict=True):
            loads[owner] += cost
        seconds = max(loads)
    memory = max((_bytes(layer, calibrated) for layer in layers), default=0.0) + FIXED
    if calibrated:  # the largest block, dense and compressed, with what its refit keeps
        memory += 6 * SINGLE * max((layer.spec.dense_parameters for layer in layers), default=0)
    seconds /= TOGETHER if gpus > 1 else 1.0
    return Fits(seconds, memory, gpus, gpu.memory_gb * 1e9)


def _seconds(layer: PlannedLayer, gpu: Gpu, calibrated: bool) -> float:
    share = DESCENT if BlastSpec.structure in families(layer.spec) else DECOMPOSITION
    products = 2 * predicted_cost(layer.spec, calibrated) / (share * gpu.bf16_tflops * 1e12)
    return products + (CALIBRATED if calibrated else EACH)


def _passes(layers: Sequence[PlannedLayer], recipe: Recipe, gpu: Gpu) -> float:
    tokens = recipe.samples * recipe.seq_len
    flops = 2.0 * tokens * sum(layer.spec.dense_parameters for layer in layers)
    epochs = 2 if recipe.refit is None else recipe.refit
    return flops * (TIMES + 3 * epochs) / (PASSES * gpu.bf16_tflops * 1e12)


def _bytes(layer: PlannedLayer, calibrated: bool) -> float:
    spec = layer.spec
    moments = MOMENT * spec.in_features**2 if calibrated else 0.0
    if calibrated and isinstance(spec.plain, BlastSpec):  # V'H and W H of its descent
        moments += SINGLE * spec.dense_parameters
        moments += min(SINGLE * spec.plain.blocks * spec.in_features * spec.plain.rank, SPREAD_BYTES)
    return moments + FACTOR * min(spec.parameters, spec.dense_parameters)


def words(found: Fits, gpu: str) -> str:
    """One line that says it."""
    each = "" if found.gpus == 1 else f"each of {found.gpus} "
    need = f"{found.memory / 1e9:,.1f} GB of the {found.room / 1e9:,.0f} of {each}{gpu}"
    if not found.fits:
        return f"compressing does not fit: {need}; take a larger GPU or --device cpu"
    time = f"{found.seconds / 60:,.1f} minutes" if found.seconds >= 90 else f"{found.seconds:,.0f} s"
    return f"compressing: {need}, about {time} beside reading and writing (predicted)"
