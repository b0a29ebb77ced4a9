"""Predicts from headers alone how many seconds each phase of a compression takes on a GPU.

Constants are fitted to runs alone on an H200 (`scripts/log`, 2026-11-26: "an 8B calibrated whole …",
"eight blocks of an 8B …", "calibrated fits in half their time …"). Other GPUs are taken to be faster in
proportion to their matrix products and their memory bandwidth. Phases have the names that a run's
`spent` gives them.
"""

from functools import cached_property

from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.experts import AT_ONCE, PAIRED
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.planning.roofline import Gpu
from blr.compressor.planning.training_sizes import (
    BATCH,
    FINISH_EPOCHS,
    HELD_BACK,
    LAST_SHARE,
    SENSITIVITY_TOKENS,
    WIDEST,
    dimensions_of,
    last_pass_bytes,
    logit_parts,
    reads_sensitivities,
    refit_epochs,
    refit_parts,
)
from blr.compressor.recipe.architectures import find_family
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    LowRankSpec,
    Spec,
    families,
)

# Shares of the ceiling of bf16 products that are reached: by BLAST's descent, alone and with moments, by
# decompositions, by what is left of a calibrated layer in float64 (its share of those operations), by
# eigenvalues, and by passes and their sums on tensor cores in TF32
DESCENT, WEIGHTED, DECOMPOSITION = 0.033, 0.0443, 0.0012
DOUBLE, EIGENVALUES, PASSES = 0.0031, 0.00044, 0.63
TRAINING, SENSING = 0.25, 0.2  # the same of a refit's passes and of sensitivities'
ROUND = 2e-3  # seconds of a round of a descent, however small the layer
EACH, CALIBRATED = 0.1, 0.02  # seconds of a layer, however small
SENSED = 0.014  # of a layer's sensitivity, however small
READ = 1.35e-3  # of a batch in a group of layers of a block, or in an expert's input, however small
STEP = 2.1e-3  # of a block in a step of training, however small
COLUMN = 1.8e-4  # of a column that is rounded behind compensation
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
        self.sizes = dimensions_of(source.config)
        self.rate = gpu.reached_tflops * 1e12  # operations a second that bf16 products reach
        self.specs = [layer.spec for layer in plan.layers]
        self.dense = sum(spec.dense_parameters for spec in self.specs)
        self.widths = sum(spec.in_features + spec.out_features for spec in self.specs)
        self.bytes = sum(layer.layer.entry.nbytes for layer in plan.layers)  # of the dense layers
        self.packed = any(spec.quantized for spec in self.specs)
        self.tokens = recipe.samples * recipe.seq_len
        self.batches = -(-recipe.samples // BATCH)
        self.batch_tokens = min(BATCH, recipe.samples) * recipe.seq_len
        held = -(-self.batches // HELD_BACK) if self.batches >= 4 else 0
        self.steps = self.batches - held  # of an epoch of training
        self.epochs = refit_epochs(recipe, self.specs, gpu=True)
        self.senses = reads_sensitivities(recipe, self.specs, self.epochs)

    @cached_property
    def groups(self) -> list[PlannedLayer]:
        """One layer of each group that reads the same input, but for experts."""
        family = find_family(self.source.model_type)
        later = {name for group in (family.groups if family else ()) for name in group.modules[1:]}
        ends = tuple(f".{name}" for name in later)
        shared = [p for p in self.plan.layers if not p.layer.stack]
        return [p for p in shared if not (ends and p.layer.module.endswith(ends))]

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
        vocabulary = self.sizes.vocabulary
        if self.recipe.finish is not None or not self.calibrated or not vocabulary:
            return (self.recipe.finish or 0) * self.calibrated
        needed = last_pass_bytes(self.dense, self.widths, self.batch_tokens, 4 * vocabulary)
        return FINISH_EPOCHS * (self.epochs > 0 and needed <= LAST_SHARE * self.gpu.memory_gb * 1e9)

    def layer_seconds(self, layer: PlannedLayer) -> float:
        """Seconds of one layer's fit."""
        spec, plain = layer.spec, layer.spec.plain
        dense = plain.structure == DenseSpec.structure
        products = 0 if dense else 2 * predicted_cost(spec, self.calibrated)
        least = EACH
        if self.calibrated:
            o, i = spec.out_features, spec.in_features
            least = CALIBRATED + DECOMPOSED * o * i * min(o, i) / (DOUBLE * self.rate)
        rounded = COLUMN * spec.in_features if spec.quantized and self.calibrated else 0.0
        rounded /= AT_ONCE if layer.layer.stack else 1
        if BlastSpec.structure not in families(spec) or spec.corrected:
            return products / (DECOMPOSITION * self.rate) + least + rounded
        rounds = (ROUNDS if layer.rounds is None else layer.rounds) / ROUNDS
        share = WEIGHTED if self.calibrated else DESCENT
        return rounds * (products / (share * self.rate) + ROUND * ROUNDS) + least + rounded


def phases(work: Compression) -> dict[str, float]:
    """Seconds of each phase of a compression on one GPU, in their order; phases that take none are left
    out."""
    after = sum(layer.bits for layer in work.plan.layers) // 8
    stored = sum(entry.nbytes for entry in work.source.entries.values())
    known = max(stored, work.bytes + 2 * work.sizes.tables)
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
    """Seconds in which the model writes its share of the text."""
    recipe, sizes = work.recipe, work.sizes
    if not recipe.mix:
        return 0.0
    weights = 2 * (work.dense + work.sizes.tables) / (work.gpu.copy_tbps * 1e12)
    return OWN + recipe.seq_len * (STEPPED * sizes.blocks + weights)


def _sensitivity(work: Compression) -> float:
    """Seconds of the forward and backward sweeps over a part of the calibration, and of eigenvalues."""
    if not work.senses:
        return 0.0
    tokens = min(work.tokens, SENSITIVITY_TOKENS)
    sums = sum(s.out_features**2 + s.in_features**2 for s in work.specs)
    passes = 2.0 * tokens * (4 * work.passed + sums) / (SENSING * work.rate)
    cubes = sum(min(s.in_features, s.out_features) ** 3 for s in work.specs)
    eigenvalues = cubes / (EIGENVALUES * work.rate)
    return SENSED * len(work.specs) + passes + eigenvalues + 2 * work.bytes / 3e9


def _inputs(work: Compression) -> float:
    """Seconds of the passes through dense and compressed blocks, and of the moments of every group's
    inputs."""
    sums = sum(2.5 * layer.spec.in_features**2 for layer in work.groups)
    flops = 2.0 * work.tokens * (2 * work.passed + sums)
    inputs = len(work.groups) + len(work.experts)
    return READ * work.batches * inputs + flops / (PASSES * work.rate)


def _refits(work: Compression) -> float:
    """Seconds in which every block is trained by itself."""
    if not work.epochs:
        return 0.0
    trained = sum(spec.parameters for spec in work.specs) / work.sizes.blocks
    parts = refit_parts(work.batch_tokens, trained / work.count, BATCH)
    steps = work.epochs * work.steps * _step(work, parts) * (PACKED if work.packed else 1.0)
    return steps + KEPT * work.bytes


def _last_pass(work: Compression) -> float:
    """Seconds in which all blocks are trained together."""
    sizes = work.sizes
    if not work.last_epochs:
        return 0.0
    logits = 4.0 * work.batch_tokens * sizes.vocabulary
    parts = logit_parts(logits, BATCH)
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
        wide = spec.in_features + spec.out_features > WIDEST
        whole = spec.corrected or not (plain.structure == LowRankSpec.structure or wide)
        flops += 6.0 * tokens * (spec.dense_parameters if whole else spec.parameters)
        if isinstance(plain, BlastSpec):
            flops += 6.0 * parts * (not wide) * spec.dense_parameters * plain.rank
            spread += wide * 4.0 * tokens * plain.blocks * plain.rank
    moved = SPREAD * spread / (work.gpu.copy_tbps * 1e12)
    return STEP * parts * work.sizes.blocks + flops / (TRAINING * work.rate) + moved


def predicted_cost(spec: Spec, calibrated: bool = False) -> float:
    """Operations of a layer's fit, up to a common factor; `calibrated`: the fit is weighted by
    activations."""
    spec = spec.plain
    o, i = spec.out_features, spec.in_features
    if not isinstance(spec, BlastSpec):
        return DECOMPOSED * o * i * min(o, i)
    weighted = i * (i + o + spec.blocks * spec.rank) * spec.rank if calibrated else 0
    products = PRODUCTS[calibrated] * o * i * spec.rank
    return ROUNDS * (weighted + products + FACTORED[calibrated] * spec.blocks * spec.rank**3)
