"""What a compression takes of a GPU's memory, the host's and the disk, predicted from headers alone.

*Needed* is what it cannot do without. What all batches have (their states, the dense inputs of a block,
what the sensitivities keep) and the last pass are on the GPU where that has the room, else on the host
or nowhere. *Taken* is what the driver shows then, with what torch's cache of memory holds beside it.
Compared with runs on H200 and H100 (`scripts/log`; the test has them).
"""

from __future__ import annotations

from dataclasses import dataclass

from blr.compressor.fitting.sizes import KEPT_SHARE, LOGITS, SENSITIVITY_TOKENS, STATES
from blr.compressor.fitting.time_forecast import Work
from blr.compressor.planning.plan import PlannedLayer
from blr.compressor.structures.sizes import SPREAD_BYTES
from blr.compressor.structures.specs import BlastSpec, CorrectedSpec, LowRankSpec, PivotedSpec, Spec

SINGLE, DOUBLE = 4, 8  # bytes of a number
CONTEXT = 1e9  # bytes of CUDA and its libraries
HELD, TIGHT = 1.4, 1.1  # times what is in use that torch's cache of memory holds, and has to
MOMENT, FACTOR = 22.0, 92.0  # bytes of a layer's fit: times i², times the factors' numbers
DESCENT = 20  # vectors that BLAST's descent remembers
TENSORS = 4  # of the logits' size in the last pass
TRAINED = 28  # bytes of a trained number with its gradient, moments, copy and best
HOST = 3.5e9  # bytes of Python, torch and CUDA in the host's memory
SMALL = 4 << 20  # bytes on disk of small files


@dataclass(frozen=True)
class Room:
    """Bytes of every GPU: `needed`, and `taken` where they are there; of the `host`."""

    needed: float
    taken: float
    host: float


def room(work: Work, gpus: int = 1) -> Room:
    """Of a run on so many GPUs."""
    largest = max((_fit(layer, work.calibrated) for layer in work.plan.layers), default=0.0)
    block = work.bytes / work.sizes.blocks
    if not work.calibrated:
        needed = CONTEXT + TIGHT * largest
        return Room(needed, needed, HOST + 2 * block)
    base = CONTEXT + SINGLE * work.sizes.tables
    block_bytes = SINGLE * work.dense / work.sizes.blocks
    sensed = _sensed(work) if work.recipe.allocation != "uniform" else 0.0
    needed = base + max(2 * block_bytes + max(largest, _refit(work)), block_bytes + sensed)
    kept = _Kept(work, gpus)
    fits = base + 2 * block_bytes + kept.states + kept.inputs + largest
    peaks = [needed, fits, base + block_bytes + kept.states + kept.levels + sensed]
    if work.last_epochs:
        peaks.append(base + kept.states + _last(work))
    taken = HELD * max(peaks)
    return Room(TIGHT * needed, taken, HOST + 2 * block + kept.away)


class _Kept:
    """Bytes of what all batches have on a GPU of a run: where each kind is a small enough part of it."""

    def __init__(self, work: Work, gpus: int) -> None:
        free = work.gpu.memory_gb * 1e9 - CONTEXT
        width, tokens = work.sizes.width, work.tokens / gpus
        sensed = min(tokens, SENSITIVITY_TOKENS / gpus)
        each = sum(layer.spec.in_features for layer in work.groups) / work.sizes.blocks
        found = {
            "states": SINGLE * STATES * tokens * width,
            "inputs": SINGLE * tokens * (each + 3 * width),
            "levels": SINGLE * sensed * width * (work.sizes.blocks + 1),
        }
        fits = {name: size <= KEPT_SHARE * free for name, size in found.items()}
        self.states, self.inputs, self.levels = (found[n] * fits[n] for n in found)
        self.away = sum(found[name] for name in ("states", "levels") if not fits[name])  # on the host


def _fit(layer: PlannedLayer, calibrated: bool) -> float:
    """Of one layer's fit."""
    spec = layer.spec
    moments = MOMENT * spec.in_features**2 if calibrated else 0.0
    if calibrated and isinstance(
        spec.plain, BlastSpec
    ):  # V'H and W H of its descent, and what it remembers
        plain, i = spec.plain, spec.in_features
        spread = SINGLE * plain.blocks * i * plain.rank
        moments += SINGLE * spec.dense_parameters + 3 * min(spread, SPREAD_BYTES)
        moments += DESCENT * SINGLE * plain.rank * (i + plain.blocks**2)
    return moments + FACTOR * min(spec.parameters, spec.dense_parameters)


def _sensed(work: Work) -> float:
    """Of a block's sums in float64, one batch's, and the largest layer's eigenvalues."""
    width, blocks = work.sizes.width, work.sizes.blocks
    outputs = sum(spec.out_features**2 for spec in work.specs)
    inputs = sum(layer.spec.in_features**2 for layer in work.groups)
    sums = (outputs + inputs) / blocks + width**2
    largest = max(s.out_features**2 + s.in_features**2 + 2 * s.dense_parameters for s in work.specs)
    logits = 4.0 * SINGLE * work.batch_tokens * work.sizes.vocabulary
    return max((SINGLE + DOUBLE) * sums + DOUBLE * largest, logits)


def _refit(work: Work) -> float:
    """Of a block's training, one batch at once."""
    if not work.epochs:
        return 0.0
    trained = sum(masters(spec) for spec in work.specs) / work.sizes.blocks
    widths = sum(s.in_features + s.out_features for s in work.specs) / work.sizes.blocks
    return TRAINED * trained + 2 * SINGLE * work.batch_tokens * widths


def _last(work: Work) -> float:
    """Of all blocks' training, one batch at once, and its logits."""
    widths = sum(spec.in_features + spec.out_features for spec in work.specs)
    logits = TENSORS * min(SINGLE * work.batch_tokens * work.sizes.vocabulary, 2 * LOGITS)
    trained = TRAINED * sum(masters(spec) for spec in work.specs)
    return trained + 2 * SINGLE * work.batch_tokens * widths + logits


def masters(spec: Spec) -> int:
    """Numbers that training moves: of those in few bits all."""
    return spec.dense_parameters if isinstance(spec, CorrectedSpec) else spec.parameters


def disk_bytes(work: Work) -> int:
    """Most bytes on disk of an output and of the journal of its run."""
    source, layers = work.source, work.plan.layers
    replaced = {planned.layer.entry.name for planned in layers}
    kept = sum(e.nbytes for name, e in source.entries.items() if name not in replaced)
    kept = kept if source.shards else 2 * work.sizes.tables  # an outline has the layers alone
    factors = sum(p.bits for p in layers) // 8
    extra = sum(path.stat().st_size for path in source.extra_files().values())
    needed = kept + 2 * factors + extra + SMALL
    if not work.calibrated:
        return needed
    trained = (work.epochs > 0) + (
        work.last_epochs > 0
    )  # factors once more, and what is behind packed ones
    packed = sum(p.layer.entry.nbytes for p in layers if p.spec.quantized)
    return needed + trained * factors + (1 + trained) * packed + _statistics(work)


def _statistics(work: Work) -> int:
    """What the journal holds of the sensitivities."""
    if work.recipe.allocation == "uniform":
        return 0
    rows = [
        (s.out_features, isinstance(s.plain, LowRankSpec | PivotedSpec | CorrectedSpec))
        for s in work.specs
    ]
    outputs = sum(o * o if whole else o for o, whole in rows)
    return SINGLE * (outputs + work.sizes.blocks * work.sizes.width**2)
