"""Predicts from headers alone what a compression takes: time, memory of GPUs and host, disk.

*Needed* memory is what a run cannot do without. Tensors of all batches (their states, the dense inputs
of a block, what sensitivities keep) and the last pass use the GPU where it has the room, else the host,
or are left out. *Taken* memory is what the driver then shows, with what torch's allocator holds back.
Both were compared with runs on H200 and H100 (`scripts/log`; the test has them).
"""

from dataclasses import asdict, dataclass
from typing import Any

from blr.compressor.base.process_environment import share_out
from blr.compressor.base.progress import duration
from blr.compressor.base.tables import amount
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.experts import AT_ONCE
from blr.compressor.planning.forecast_time import Compression, phases
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.planning.roofline import Gpu
from blr.compressor.planning.training_sizes import (
    DOUBLE,
    HOST_BYTES,
    KEPT_SHARE,
    LOGITS,
    SENSITIVITY_TOKENS,
    SINGLE,
    STATES,
)
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.base import SPREAD_BYTES
from blr.compressor.structures.specs import BlastSpec, CorrectedSpec, LowRankSpec, Spec

TOGETHER = 0.85  # of the speed that as many GPUs would have apart
ALONE = ("libraries and the rest", "reading, writing and the check")  # what one process does
CONTEXT = 1e9  # bytes of CUDA and its libraries
HELD, TIGHT = 1.4, 1.1  # times what is in use that torch's cache of memory holds, and has to
MOMENT, FACTOR = 22.0, 92.0  # bytes of a layer's fit: times i², times the factors' numbers
ROUTED = 24.0  # bytes of the sums of an expert's inputs and of what a batch adds, times i²
DESCENT = 20  # vectors that BLAST's descent remembers
TENSORS = 4  # of the logits' size in the last pass
TRAINED = 28  # bytes of a trained number with its gradient, moments, copy and best
SMALL = 4 << 20  # bytes on disk of small files


@dataclass(frozen=True)
class Fits:
    """The forecast of a run on `gpus` GPUs of `room` bytes: seconds by phase; bytes that each GPU needs
    (`memory`) and takes if they are free; bytes of the host and on disk."""

    phases: dict[str, float]
    memory: float
    taken: float
    host: float
    disk: float
    gpus: int
    room: float

    @property
    def seconds(self) -> float:
        """Seconds from start to verified output."""
        return sum(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.memory <= self.room


def planned(
    source: Source, plan: Plan, recipe: Recipe, gpu: Gpu, gpus: int, calibrated: bool
) -> dict[str, Any]:
    """The forecast of compressing by `plan`, JSON-ready; `said` is one line for people."""
    found = forecast(Compression(source, plan, recipe, gpu, calibrated), gpus)
    told = {"seconds": found.seconds, "fits": found.fits, "said": words(found, gpu.name)}
    return asdict(found) | told


def forecast(work: Compression, gpus: int = 1) -> Fits:
    """The forecast of a run whose GPUs share out the fits, and the batches of a calibration."""
    found = phases(work)
    if gpus > 1:
        shared = {name: s / (gpus * TOGETHER) for name, s in found.items() if name not in ALONE}
        costs, loads = [work.layer_seconds(layer) for layer in work.plan.layers], [0.0] * gpus
        for owner, cost in zip(share_out(costs, gpus), costs, strict=True):
            loads[owner] += cost
        found |= shared if work.calibrated else {"fits": max(loads) / TOGETHER}
    size, whole = room(work, gpus), work.gpu.memory_gb * 1e9
    taken = min(size.taken, whole)
    return Fits(found, size.needed, max(taken, size.needed), size.host, disk_bytes(work), gpus, whole)


def words(found: Fits, gpu: str) -> str:
    """The forecast as one line."""
    each = gpu if found.gpus == 1 else f"each of {found.gpus} {gpu}"
    need = f"{amount(found.memory)} of the {found.room / 1e9:,.0f} of {each}"
    if not found.fits:
        return f"compressing does not fit: {need}; take a larger --gpu or --device cpu"
    if found.taken > 1.1 * found.memory:
        need += f" needed, {amount(found.taken)} taken where free"
    beside = f"{amount(found.host)} of the host, {amount(found.disk)} of disk"
    return f"compressing: about {duration(found.seconds)}; {need}; {beside} (predicted)"


@dataclass(frozen=True)
class Room:
    """Bytes of memory: each GPU's `needed` ones, those `taken` if they are free, and the `host`'s."""

    needed: float
    taken: float
    host: float


def room(work: Compression, gpus: int = 1) -> Room:
    """The memory of a run on so many GPUs."""
    largest = max((_fit(layer, work.calibrated) for layer in work.plan.layers), default=0.0)
    block = work.bytes / work.sizes.blocks
    if not work.calibrated:
        needed = CONTEXT + TIGHT * largest
        return Room(needed, needed, HOST_BYTES + 2 * block)
    if work.experts:
        largest = max(largest, AT_ONCE * max(_fit(layer, True) for layer in work.experts))
        largest += ROUTED * sum(p.spec.in_features**2 for p in work.experts) / work.sizes.blocks
    base = CONTEXT + SINGLE * work.sizes.tables
    block_bytes = SINGLE * work.dense / work.sizes.blocks
    sensed = _sensed(work) if work.senses else 0.0
    refit = _training(work, work.sizes.blocks) if work.epochs else 0.0
    needed = base + max(2 * block_bytes + max(largest, refit), block_bytes + sensed)
    kept = _of_all_batches(work, gpus)
    free = KEPT_SHARE * (work.gpu.memory_gb * 1e9 - CONTEXT)
    states, inputs, levels = (size * (size <= free) for size in kept.values())
    away = kept["states"] - states + kept["levels"] - levels  # on the host instead
    fits = base + 2 * block_bytes + states + inputs + largest
    peaks = [needed, fits, base + block_bytes + states + levels + sensed]
    if work.last_epochs:
        logits = TENSORS * min(SINGLE * work.batch_tokens * work.sizes.vocabulary, 2 * LOGITS)
        peaks.append(base + states + _training(work) + logits)
    return Room(TIGHT * needed, HELD * max(peaks), HOST_BYTES + 2 * block + away)


def _of_all_batches(work: Compression, gpus: int) -> dict[str, float]:
    """Bytes of the tensors that exist for all batches at once, on each of so many GPUs."""
    width, tokens = work.sizes.width, work.tokens / gpus
    sensed = min(tokens, SENSITIVITY_TOKENS / gpus)
    each = sum(layer.spec.in_features for layer in work.groups) / work.sizes.blocks
    return {
        "states": SINGLE * STATES * tokens * width,
        "inputs": SINGLE * tokens * (each + 3 * width),
        "levels": SINGLE * sensed * width * (work.sizes.blocks + 1),
    }


def _fit(layer: PlannedLayer, calibrated: bool) -> float:
    """Bytes that the fit of one layer takes."""
    spec = layer.spec
    moments = MOMENT * spec.in_features**2 if calibrated else 0.0
    plain, i = spec.plain, spec.in_features
    if calibrated and isinstance(plain, BlastSpec):  # V'H and W H of its descent, and what it remembers
        spread = SINGLE * plain.blocks * i * plain.rank
        moments += SINGLE * spec.dense_parameters + 3 * min(spread, SPREAD_BYTES)
        moments += DESCENT * SINGLE * plain.rank * (i + plain.blocks**2)
    return moments + FACTOR * min(spec.parameters, spec.dense_parameters)


def _sensed(work: Compression) -> float:
    """Bytes of measuring sensitivities: a block's sums in float64, one batch's products, and the
    eigenvalues of the largest layer."""
    width, blocks = work.sizes.width, work.sizes.blocks
    outputs = sum(spec.out_features**2 for spec in work.specs)
    inputs = sum(layer.spec.in_features**2 for layer in [*work.groups, *work.experts])
    sums = (outputs + inputs) / blocks + width**2
    largest = max(s.out_features**2 + s.in_features**2 + 2 * s.dense_parameters for s in work.specs)
    logits = 4.0 * SINGLE * work.batch_tokens * work.sizes.vocabulary
    return max((SINGLE + DOUBLE) * sums + DOUBLE * largest, logits)


def _training(work: Compression, parts: int = 1) -> float:
    """Bytes of training one of `parts` of the blocks on a batch, without logits."""
    trained = sum(masters(spec) for spec in work.specs) / parts
    return TRAINED * trained + 2 * SINGLE * work.batch_tokens * work.widths / parts


def masters(spec: Spec) -> int:
    """Numbers that training moves: of a corrected layer all of its dense weight."""
    return spec.dense_parameters if spec.corrected else spec.parameters


def disk_bytes(work: Compression) -> int:
    """Upper estimate of the bytes on disk of an output and of its run's journal."""
    source, layers = work.source, work.plan.layers
    replaced = {planned.layer.entry.name for planned in layers}
    kept = sum(e.nbytes for name, e in source.entries.items() if name not in replaced)
    kept = kept if source.shards else 2 * work.sizes.tables  # an outline has the layers alone
    factors = sum(p.bits for p in layers) // 8
    extra = sum(path.stat().st_size for path in source.extra_files().values())
    needed = kept + 2 * factors + extra + SMALL
    if not work.calibrated:
        return needed
    # Factors once more, and what is behind packed ones
    trained = (work.epochs > 0) + (work.last_epochs > 0)
    packed = sum(p.layer.entry.nbytes for p in layers if p.spec.quantized)
    needed += trained * factors + (1 + trained) * packed
    if not work.senses:
        return needed
    whole = LowRankSpec | CorrectedSpec  # whose Fisher information is kept whole
    outputs = sum(s.out_features ** (2 if isinstance(s.plain, whole) else 1) for s in work.specs)
    return needed + SINGLE * (outputs + work.sizes.blocks * work.sizes.width**2)
