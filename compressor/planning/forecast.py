"""Predicts from headers alone what a compression takes: time, memory of GPUs and host, disk. *Needed*
memory is what a run cannot do without. Tensors of all batches and the last pass use the GPU where it has
the room, else the host, or are left out. *Taken* memory is what the driver then shows. Constants are
fitted to runs alone on an H200 (LOG, 2026-11-26; the test has them)."""

from dataclasses import asdict, dataclass
from functools import cached_property

from blr.compressor.base.process_environment import share_out
from blr.compressor.base.progress import duration
from blr.compressor.base.tables import amount
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning import training_sizes
from blr.compressor.planning.layers import AT_ONCE, PAIRED
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.planning.roofline import Gpu
from blr.compressor.planning.training_sizes import BATCH, DOUBLE, LOGITS, SENSITIVITY_TOKENS, SINGLE
from blr.compressor.recipe.architectures import find_family
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.base import SPREAD_BYTES
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    Spec,
    families,
)

TOGETHER = 0.85  # of the speed that as many GPUs would have apart
ALONE = ("libraries and the rest", "reading, writing and the check")  # what one process does
CONTEXT = 1e9  # bytes of CUDA and its libraries
HELD, TIGHT = 1.4, 1.1  # times what is in use that torch's cache of memory holds, and has to
MOMENT, FACTOR = 22.0, 92.0  # bytes of a layer's fit: times i², times the factors' numbers
ROUTED = 24.0  # bytes of the sums of an expert's inputs and of what a batch adds, times i²
REMEMBERED = 20  # vectors, by BLAST's descent
TENSORS = 4  # of the logits' size in the last pass
TRAINED = 28  # bytes of a trained number with its gradient, moments, copy and best
SMALL = 4 << 20  # bytes on disk of small files
# Shares of the ceiling of bf16 products that are reached: by BLAST's descent, alone and with moments, by
# decompositions, by what is left of a calibrated layer in float64 (its share of those operations), by
# eigenvalues, and by passes and their sums on tensor cores in TF32
DESCENT, WEIGHTED, DECOMPOSITION = 0.033, 0.0443, 0.0012
IN_DOUBLE, EIGENVALUES, PASSES = 0.0031, 0.00044, 0.63
TRAINING, SENSING = 0.25, 0.2  # the same of a refit's passes and of sensitivities'
ROUND = 2e-3  # seconds of a round of a descent, however small the layer
EACH, CALIBRATED = 0.1, 0.02  # seconds of a layer, however small
SENSED = 0.014  # of a layer's sensitivity, however small
READ = 1.35e-3  # of a batch in a group of layers of a block, or in some experts' input, however small
STEP = 2.1e-3  # of a block in a step of training, however small
COLUMN = 1.8e-4  # of a column that is rounded behind compensation
ALIKE = 0.4  # of a layer's fit, where experts of one shape are fitted together
PACKED = 1.35  # times that steps take longer where weights are packed
SPREAD = 145  # times that a step moves what BLAST makes of a token, which is not run by its dense weight
KEPT = 6.9e-9  # seconds a byte of a block that is trained: compared with the dense one, and kept
BETWEEN = 6e-9  # seconds a byte of the layers: loaded, hashed, put into the journal
START = 16.0  # of libraries
FILES, STREAMED = 4.5, 0.75e-9  # seconds of reading, writing and the check, and a byte of what is
OWN, STEPPED = 1.5, 0.33e-3  # of loading a model that writes text, and of a layer and token there
DECOMPOSED = 20.0  # operations of a decomposition for each one of a product of the same matrix
# Of BLAST's descent, for each operation of a product with the inputs' moments: its other products, and
# batched factorizations with the solves behind them; without moments, and with them, where a GPU solves
# tile by tile (LOG, 2026-11-26: 33.5 ms an evaluation of an 8B's gate, down 73, q 13.9, k 2.5)
PRODUCTS, FACTORED = {False: 3.0, True: 0.7}, {False: 18.0, True: 3.9}
ROUNDS = 100.0  # of BLAST's descent


class Compression:
    """A compression to forecast, and the sizes that forecasts ask for."""

    def __init__(self, source: Source, plan: Plan, recipe: Recipe, gpu: Gpu, calibrated: bool) -> None:
        self.source, self.plan, self.recipe = source, plan, recipe
        self.gpu, self.calibrated = gpu, calibrated
        self.sizes = training_sizes.dimensions_of(source.config)
        self.rate = gpu.reached_tflops * 1e12  # operations a second that bf16 products reach
        self.specs = [layer.spec for layer in plan.layers]
        self.dense = sum(spec.dense_parameters for spec in self.specs)
        self.widths = sum(spec.in_features + spec.out_features for spec in self.specs)
        self.bytes = sum(layer.layer.entry.nbytes for layer in plan.layers)  # of the dense layers
        self.packed = any(spec.quantized for spec in self.specs)
        self.tokens = recipe.samples * recipe.seq_len
        self.batches = -(-recipe.samples // BATCH)
        self.batch_tokens = min(BATCH, recipe.samples) * recipe.seq_len
        held = -(-self.batches // training_sizes.HELD_BACK) if self.batches >= 4 else 0
        self.steps = self.batches - held  # of an epoch of training
        self.epochs = training_sizes.refit_epochs(recipe, self.specs, gpu=True)
        self.senses = training_sizes.reads_sensitivities(recipe, self.specs, self.epochs)

    @cached_property
    def groups(self) -> list[PlannedLayer]:
        """One layer of each group that reads the same input, but for experts."""
        family = find_family(self.source.model_type)
        later = {name for group in (family.groups if family else ()) for name in group.modules[1:]}
        ends = tuple(f".{name}" for name in later)
        shared = [p for p in self.plan.layers if not p.layer.stack]
        return [p for p in shared if not p.layer.module.endswith(ends)]

    @cached_property
    def experts(self) -> list[PlannedLayer]:
        """One layer of each input of each expert."""
        return [p for p in self.plan.layers if p.layer.stack and p.layer.type not in PAIRED]

    @cached_property
    def passed(self) -> float:
        """The dense parameters that a token passes: of the experts of a block it chooses a few."""
        return sum(p.spec.dense_parameters * self.share(p) for p in self.plan.layers)

    def share(self, layer: PlannedLayer) -> float:
        """The share of tokens that pass a layer: of an expert those that choose it."""
        chosen = self.source.config.get("num_experts_per_tok", self.count)
        return min(chosen / self.count, 1) if layer.layer.stack else 1.0

    @cached_property
    def count(self) -> int:
        """How many experts a block has; 1 without any."""
        return max(len({p.layer.module.rpartition(".")[2] for p in self.experts}), 1)

    @cached_property
    def last_epochs(self) -> int:
        """Epochs of the last pass: as asked for, else the usual number on a GPU that has the room."""
        logits = 4 * self.sizes.vocabulary
        if self.recipe.finish is not None or not self.calibrated or not logits:
            return (self.recipe.finish or 0) * self.calibrated
        room = training_sizes.LAST_SHARE * self.gpu.memory_gb * 1e9
        needed = training_sizes.last_pass_bytes(self.dense, self.widths, self.batch_tokens, logits)
        return training_sizes.FINISH_EPOCHS * (self.epochs > 0 and needed <= room)

    def layer_seconds(self, layer: PlannedLayer) -> float:
        spec = layer.spec
        dense = spec.plain.structure == DenseSpec.structure
        products = 0 if dense else 2 * predicted_cost(spec, self.calibrated)
        least = EACH
        if self.calibrated:
            o, i = spec.out_features, spec.in_features
            least = CALIBRATED + DECOMPOSED * o * i * min(o, i) / (IN_DOUBLE * self.rate)
        rounded = COLUMN * spec.in_features if spec.quantized and self.calibrated else 0.0
        rounded /= AT_ONCE if layer.layer.stack else 1
        if BlastSpec.structure not in families(spec) or spec.corrected:
            together = ALIKE if layer.layer.stack and self.calibrated else 1.0
            return together * (products / (DECOMPOSITION * self.rate) + least + rounded)
        rounds = (ROUNDS if layer.rounds is None else layer.rounds) / ROUNDS
        share = WEIGHTED if self.calibrated else DESCENT
        return rounds * (products / (share * self.rate) + ROUND * ROUNDS) + least + rounded


def phases(work: Compression) -> dict[str, float]:
    """Seconds of each phase that takes any, on one GPU, by the names of a run's `spent`."""
    after = sum(layer.bits for layer in work.plan.layers) // 8
    known = max(work.source.nbytes, work.bytes + 2 * work.sizes.tables)
    found = {"libraries and the rest": START + BETWEEN * work.bytes * work.calibrated}
    streamed = known + known - work.bytes + after
    found["reading, writing and the check"] = FILES + STREAMED * streamed
    if work.calibrated:
        found |= {"own text": _own_text(work), "sensitivity": _sensitivity(work)}
        found |= {"inputs": _inputs(work)}
    found["fits"] = sum(map(work.layer_seconds, work.plan.layers))
    if work.calibrated:
        found |= {"refits": _refits(work), "last pass": _last_pass(work)}
    return {name: seconds for name, seconds in found.items() if seconds}


def _own_text(work: Compression) -> float:
    recipe, sizes = work.recipe, work.sizes
    if not recipe.mix:
        return 0.0
    weights = 2 * (work.dense + work.sizes.tables) / (work.gpu.copy_tbps * 1e12)
    return OWN + recipe.seq_len * (STEPPED * sizes.blocks + weights)


def _sensitivity(work: Compression) -> float:
    """The forward and backward sweeps over a part of the calibration, and eigenvalues."""
    if not work.senses:
        return 0.0
    tokens = min(work.tokens, SENSITIVITY_TOKENS)
    sums = sum(s.out_features**2 + s.in_features**2 for s in work.specs)
    passes = 2.0 * tokens * (4 * work.passed + sums) / (SENSING * work.rate)
    cubes = sum(min(s.in_features, s.out_features) ** 3 for s in work.specs)
    eigenvalues = cubes / (EIGENVALUES * work.rate)
    return SENSED * len(work.specs) + passes + eigenvalues + 2 * work.bytes / 3e9


def _inputs(work: Compression) -> float:
    """The passes through dense and compressed blocks, and the moments of every group's inputs."""
    sums = sum(2.5 * layer.spec.in_features**2 for layer in work.groups)
    flops = 2.0 * work.tokens * (2 * work.passed + sums)
    inputs = len(work.groups) + len(work.experts) / AT_ONCE
    return READ * work.batches * inputs + flops / (PASSES * work.rate)


def _refits(work: Compression) -> float:
    if not work.epochs:
        return 0.0
    trained = sum(spec.parameters for spec in work.specs) / work.sizes.blocks
    parts = training_sizes.refit_parts(work.batch_tokens, trained / work.count, BATCH)
    steps = work.epochs * work.steps * _step(work, parts) * (PACKED if work.packed else 1.0)
    return steps + KEPT * work.bytes


def _last_pass(work: Compression) -> float:
    sizes = work.sizes
    if not work.last_epochs:
        return 0.0
    logits = 4.0 * work.batch_tokens * sizes.vocabulary
    parts = training_sizes.logit_parts(logits, BATCH)
    head = 8.0 * work.batch_tokens * sizes.vocabulary * sizes.width / (0.4 * work.rate)
    moved = 12 * logits / (work.gpu.copy_tbps * 1e12)
    step = (_step(work, parts) + head + moved) * (PACKED if work.packed else 1.0)
    return work.last_epochs * work.steps * step


def _step(work: Compression, parts: int) -> float:
    """Seconds of one training step of all blocks, without the head, on a batch in so many parts."""
    flops = spread = 0.0
    for layer in work.plan.layers:
        spec, tokens = layer.spec, work.batch_tokens * work.share(layer)
        plain = spec.added.plain
        wide = spec.in_features + spec.out_features > training_sizes.WIDEST
        whole = spec.corrected or not (plain.structure == LowRankSpec.structure or wide)
        flops += 6.0 * tokens * (spec.dense_parameters if whole else spec.parameters)
        if isinstance(plain, BlastSpec):
            flops += 6.0 * parts * (not wide) * spec.dense_parameters * plain.rank
            spread += wide * 4.0 * tokens * plain.blocks * plain.rank
    moved = SPREAD * spread / (work.gpu.copy_tbps * 1e12)
    return STEP * parts * work.sizes.blocks + flops / (TRAINING * work.rate) + moved


def predicted_cost(spec: Spec, calibrated: bool = False) -> float:
    """Operations of a layer's fit, up to a factor; `calibrated`: it is weighted by activations."""
    spec = spec.plain
    o, i = spec.out_features, spec.in_features
    if not isinstance(spec, BlastSpec):
        return DECOMPOSED * o * i * min(o, i)
    weighted = i * (i + o + spec.blocks * spec.rank) * spec.rank if calibrated else 0
    products = PRODUCTS[calibrated] * o * i * spec.rank
    return ROUNDS * (weighted + products + FACTORED[calibrated] * spec.blocks * spec.rank**3)


@dataclass(frozen=True)
class Fits:
    """A run on `gpus` GPUs of `room` bytes: seconds by phase; bytes that each GPU needs (`memory`) and
    takes if they are free; bytes of the host and on disk."""

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
) -> dict[str, object]:
    """The forecast of compressing by `plan`, JSON-ready; `said` is one line for people."""
    found = forecast(Compression(source, plan, recipe, gpu, calibrated), gpus)
    return asdict(found) | {"seconds": found.seconds, "fits": found.fits, "said": words(found, gpu.name)}


def forecast(work: Compression, gpus: int = 1) -> Fits:
    """The forecast of a run whose GPUs share out the fits, and the batches of a calibration."""
    found = phases(work)
    if gpus > 1:
        shared = {name: s / (gpus * TOGETHER) for name, s in found.items() if name not in ALONE}
        costs, loads = [work.layer_seconds(layer) for layer in work.plan.layers], [0.0] * gpus
        for owner, cost in zip(share_out(costs, gpus), costs, strict=True):
            loads[owner] += cost
        found |= shared if work.calibrated else {"fits": max(loads) / TOGETHER}
    (needed, taken, host), whole = room(work, gpus), work.gpu.memory_gb * 1e9
    return Fits(found, needed, max(min(taken, whole), needed), host, disk_bytes(work), gpus, whole)


def words(found: Fits, gpu: str) -> str:
    each = gpu if found.gpus == 1 else f"each of {found.gpus} {gpu}"
    need = f"{amount(found.memory)} of the {found.room / 1e9:,.0f} of {each}"
    if not found.fits:
        return f"compressing does not fit: {need}; take a larger --gpu or --device cpu"
    if found.taken > 1.1 * found.memory:
        need += f" needed, {amount(found.taken)} taken where free"
    beside = f"{amount(found.host)} of the host, {amount(found.disk)} of disk"
    return f"compressing: about {duration(found.seconds)}; {need}; {beside} (predicted)"


def room(work: Compression, gpus: int = 1) -> tuple[float, float, float]:
    """Bytes of memory: those that each GPU needs, and takes if they are free, and the host's."""
    largest = max((_fit(layer, work.calibrated) for layer in work.plan.layers), default=0.0)
    block = work.bytes / work.sizes.blocks
    if not work.calibrated:
        needed = CONTEXT + TIGHT * largest
        return needed, needed, training_sizes.HOST_BYTES + 2 * block
    if work.experts:
        largest = max(largest, AT_ONCE * max(_fit(layer, True) for layer in work.experts))
        largest += ROUTED * sum(p.spec.in_features**2 for p in work.experts) / work.sizes.blocks
    base = CONTEXT + SINGLE * work.sizes.tables
    block_bytes = SINGLE * work.dense / work.sizes.blocks
    sensed = _sensed(work) if work.senses else 0.0
    refit = _training(work, work.sizes.blocks) if work.epochs else 0.0
    needed = base + max(2 * block_bytes + max(largest, refit), block_bytes + sensed)
    kept = _of_all_batches(work, gpus)
    free = training_sizes.KEPT_SHARE * (work.gpu.memory_gb * 1e9 - CONTEXT)
    states, inputs, levels = (size * (size <= free) for size in kept.values())
    away = kept["states"] - states + kept["levels"] - levels  # on the host instead
    fits = base + 2 * block_bytes + states + inputs + largest
    peaks = [needed, fits, base + block_bytes + states + levels + sensed]
    if work.last_epochs:
        logits = TENSORS * min(SINGLE * work.batch_tokens * work.sizes.vocabulary, 2 * LOGITS)
        peaks.append(base + states + _training(work) + logits)
    return TIGHT * needed, HELD * max(peaks), training_sizes.HOST_BYTES + 2 * block + away


def _of_all_batches(work: Compression, gpus: int) -> dict[str, float]:
    """Bytes of the tensors that exist for all batches at once, on each of so many GPUs."""
    width, tokens = work.sizes.width, work.tokens / gpus
    sensed = min(tokens, SENSITIVITY_TOKENS / gpus)
    each = sum(layer.spec.in_features for layer in work.groups) / work.sizes.blocks
    return {
        "states": SINGLE * training_sizes.STATES * tokens * width,
        "inputs": SINGLE * tokens * (each + 3 * width),
        "levels": SINGLE * sensed * width * (work.sizes.blocks + 1),
    }


def _fit(layer: PlannedLayer, calibrated: bool) -> float:
    """Bytes that the fit of one layer takes."""
    spec, plain, i = layer.spec, layer.spec.plain, layer.spec.in_features
    moments = MOMENT * i**2 if calibrated else 0.0
    if calibrated and isinstance(plain, BlastSpec):  # V'H and W H of its descent, and what it remembers
        spread = SINGLE * plain.blocks * i * plain.rank
        moments += SINGLE * spec.dense_parameters + 3 * min(spread, SPREAD_BYTES)
        moments += REMEMBERED * SINGLE * plain.rank * (i + plain.blocks**2)
    return moments + FACTOR * min(spec.parameters, spec.dense_parameters)


def _sensed(work: Compression) -> float:
    """Bytes of sensitivities: a block's sums, one batch's products, and the largest eigenvalues."""
    width, blocks = work.sizes.width, work.sizes.blocks
    outputs = sum(spec.out_features**2 for spec in work.specs)
    inputs = sum(layer.spec.in_features**2 for layer in [*work.groups, *work.experts])
    sums = (outputs + inputs) / blocks + width**2
    largest = max(s.out_features**2 + s.in_features**2 + 2 * s.dense_parameters for s in work.specs)
    logits = 4.0 * SINGLE * work.batch_tokens * work.sizes.vocabulary
    return max((SINGLE + DOUBLE) * sums + DOUBLE * largest, logits)


def _training(work: Compression, parts: int = 1) -> float:
    """Bytes of training one of `parts` of the blocks on a batch, without logits."""
    # Of a corrected layer all of its dense weight
    trained = sum(s.dense_parameters if s.corrected else s.parameters for s in work.specs) / parts
    return TRAINED * trained + 2 * SINGLE * work.batch_tokens * work.widths / parts


def disk_bytes(work: Compression) -> int:
    """Upper estimate of the bytes on disk of an output and of its run's journal."""
    source, layers = work.source, work.plan.layers
    replaced = {planned.layer.entry.name for planned in layers}
    kept = sum(e.nbytes for name, e in source.entries.items() if name not in replaced)
    kept = kept if source.shards else 2 * work.sizes.tables  # an outline has the layers alone
    factors = sum(p.bits for p in layers) // 8
    extra = sum(path.stat().st_size for path in source.extras.carried.values())
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
