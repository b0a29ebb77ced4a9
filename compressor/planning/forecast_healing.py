"""Predicts from headers alone what a healing run takes: memory and time of every GPU. A trained
parameter takes its bf16 copy and gradient, and in float32 its master, the master's gradient and two
moments. With --fsdp a GPU holds a share of both models' blocks, and one block of either whole."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from blr.compressor.base.tables import amount
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning import training_sizes
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.roofline import Gpu
from blr.compressor.planning.training_sizes import HALF, SINGLE, Dimensions, dimensions_of
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.structures.specs import BlastSpec, DenseSpec, LowRankSpec, Spec

TRAINED = 2 * HALF + 4 * SINGLE  # bytes of a trained parameter
LOGIT = 20  # bytes of one, of both models, with what its gradient takes
WIDE, MIDDLE = 11, 4.5  # numbers of a token kept in a block: times its width, times the MLP's
FASTEST = 500_000  # tokens a second that forecasts tell of
RESERVED = 3e9  # bytes that CUDA, its libraries and fragments take
FILLED = 0.89  # of the room at the most: pools of graphs break it up
# Of the products' ceiling, and times that a kept number is moved: what runs alone on an H200 took (LOG)
EFFICIENCY, MOVED = 0.7, 14
HOST = 3.8e-3  # seconds of a step that no GPU shortens (mini-llama's; LOG)
SLICED = 4 * SINGLE  # bytes of one in its slice (`sharding.py`)
ROUNDING = 5 * SINGLE  # bytes a number while the gradient of what is rounded is collected
TOGETHER = 0.9  # of the speed that as many GPUs would have apart
KEPT = 4 * SINGLE  # bytes on disk of a trained one in a state: its master, two moments and its best
SMALL = 1 << 20  # bytes of small files beyond those of the student: card, metrics, a newer code
OWN = 4  # bytes of a token of own text
FEW = 4  # windows, too few for products to run well
WINDOWS = 64  # a step on a GPU
REMEDY = (
    "take a larger GPU, shorter windows, or train less (blr heal --lora 8; in few bits "
    "--train norms,biases); without few bits also a higher --cf, or more GPUs"
)


@dataclass(frozen=True)
class Sizes(Dimensions):
    """The dimensions of a model, its number of parameters, and how many of them are trained."""

    parameters: int
    trained: int

    @property
    def inside(self) -> float:
        return (WIDE * self.width + MIDDLE * self.middle) * HALF


@dataclass(frozen=True)
class Forecast:
    """Bytes on each of `gpus` devices by what they are for, where a pass takes `micro` windows."""

    teacher: float
    trained: float
    composed: float
    activations: float
    logits: float
    micro: int
    checkpointing: bool
    room: float
    tokens_per_second: float
    gpus: int = 1
    sharded: bool = False

    @property
    def total(self) -> float:
        parts = self.teacher + self.trained + self.composed + self.activations + self.logits
        return parts + RESERVED

    @property
    def fits(self) -> bool:
        return self.total <= FILLED * self.room


def sizes_of(
    config: Mapping[str, object], specs: Mapping[str, Spec], stored: int, train: tuple[str, ...]
) -> Sizes:
    """The sizes of the dense model with `config`, whose layers `specs` replace and which stores
    `stored` parameters; `train` names the kinds that are trained."""
    found = dimensions_of(config)
    table = found.vocabulary * found.width
    dense = sum(spec.dense_parameters for spec in specs.values())
    trained = sum(masters(spec) for spec in specs.values()) if "factors" in train else 0
    trained += table * (("embeddings" in train) + ("head" in train and not found.tied))
    return Sizes(**vars(found), parameters=max(stored, dense + found.tables), trained=trained)


def disk_bytes(source: Source, specs: Mapping[str, Spec], options: HealOptions, own: int) -> int:
    """Upper estimate of the bytes on disk of a run whose teacher writes `own` tokens."""
    found = sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())
    return max(found, source.nbytes) + SMALL + OWN * own + kept_bytes(specs, source.entries, options)


def kept_bytes(
    specs: Mapping[str, Spec], entries: Mapping[str, TensorEntry], options: HealOptions
) -> int:
    """Upper estimate of the bytes on disk of a training's saved state and of the tensors it makes."""
    floats = [entry for entry in entries.values() if entry.is_float]
    trained = sum(masters(spec) for spec in specs.values()) if "factors" in options.train else 0
    if options.lora:
        trained = added(specs, options.lora)
    if {"norms", "biases"} & {*options.train}:
        trained += sum(entry.parameters for entry in floats if len(entry.shape) == 1)
    if {"dense", "embeddings", "head"} & {*options.train}:
        trained += sum(e.parameters for e in floats if e.name.rpartition(".")[0] not in specs)
    once = options.minutes is not None and options.minutes < options.save_minutes / 2
    states = 1 if once else 2  # a second one is written before it takes the first one's place
    return (states * KEPT + SINGLE) * trained


def masters(spec: Spec) -> int:
    """Numbers that training moves in a layer, with the scales of few bits, not those of float8."""
    scales = 0
    for _, leaf in spec.parts():
        if (packing := leaf.packing) is not None and not packing.fp8:
            formats = ((prod(shape), packing.format_of(name)) for name, shape in leaf.shapes().items())
            scales += sum(-(-numbers // form[1]) for numbers, form in formats if form is not None)
    return spec.parameters + scales


def added(specs: Mapping[str, Spec], rank: int) -> int:
    """Numbers of low-rank additions to all layers."""
    return rank * sum(spec.in_features + spec.out_features for spec in specs.values())


@dataclass(frozen=True)
class GpuGroup:
    """The GPUs of a run, each of `room` bytes (None: of its kind); `sharded`: both models are."""

    count: int = 1
    sharded: bool = False
    room: float | None = None


ALONE = GpuGroup()


def forecast(
    sizes: Sizes, specs: Mapping[str, Spec], options: HealOptions, gpu: Gpu, group: GpuGroup = ALONE
) -> Forecast:
    """The forecast with as many windows a pass as fit; with checkpointing if those are under `FEW`."""
    windows = max(1, options.batch // options.window) if options.batch else WINDOWS
    windows = -(-windows // group.count)
    models, room = _models(sizes, specs, group), group.room or gpu.memory_gb * 1e9
    gained = group.count * TOGETHER if group.count > 1 else 1
    for kept in [False, True] if options.checkpointing is None else [options.checkpointing]:
        speed = gained * _speed(sizes, specs, windows * options.window, kept, gpu)
        micro, least = windows, 1 if kept or options.checkpointing is False else min(FEW, windows)
        while micro >= least:
            sides = _of_pass(sizes, specs, micro * options.window, kept, options.matches_states)
            found = Forecast(*models, *sides, micro, kept, room, speed, group.count, group.sharded)
            if found.fits:
                return found
            micro //= 2
    return found


def _of_pass(
    sizes: Sizes, specs: Mapping[str, Spec], tokens: int, kept: bool, states: bool
) -> tuple[float, float, float]:
    """Bytes of composed weights, activations and logits in a pass. `kept`: only the inputs of blocks are
    kept; `states`: the outputs of both models' blocks are, too."""
    composed = sum(_composed(spec) for spec in specs.values()) * HALF
    shared = sizes.blocks if not kept else 1  # blocks whose insides are held at once
    inputs = sizes.width * HALF * sizes.blocks * (kept + states)
    activations = tokens * (sizes.inside * shared + 2 * sizes.width * SINGLE + inputs)
    logits = min(training_sizes.CHUNK, tokens * sizes.vocabulary) * LOGIT
    return composed / sizes.blocks * shared, activations, logits


def _speed(sizes: Sizes, specs: Mapping[str, Spec], tokens: int, kept: bool, gpu: Gpu) -> float:
    """Tokens a second of one GPU in a step of `tokens`, from a token's products, bytes and part of the
    update. The teacher runs forward; the student forward and, for twice the time, backward."""
    plain = (spec.plain for spec in specs.values())
    low = (spec for spec in plain if spec.structure == LowRankSpec.structure)
    saved = sum(spec.dense_parameters - spec.parameters for spec in low)
    flops = 2.0 * (sizes.parameters + (sizes.parameters - saved) * (4 if kept else 3))
    products = flops / (EFFICIENCY * gpu.reached_tflops * 1e12)
    moved = MOVED * sizes.inside * sizes.blocks + LOGIT * sizes.vocabulary
    bandwidth = gpu.copy_tbps * 1e12
    update = 2 * TRAINED * sizes.trained / bandwidth
    return 1 / (products + moved / bandwidth + (update + HOST) / tokens)


def _models(sizes: Sizes, specs: Mapping[str, Spec], group: GpuGroup) -> tuple[float, float]:
    """Bytes of the teacher, and of what is trained with its optimizer."""
    largest = max((masters(s) for s in specs.values() if s.quantized), default=0)
    if not group.sharded:
        return sizes.parameters * HALF, sizes.trained * TRAINED + largest * ROUNDING
    inside = sizes.parameters - sizes.tables
    whole = 2 * inside / sizes.blocks  # the block that computes, and the next one
    teacher = (inside / group.count + whole + sizes.tables) * HALF
    part = sizes.trained / group.count * SLICED
    return teacher, part + 2 * sizes.trained / sizes.blocks * (HALF + SINGLE)


def _composed(spec: Spec) -> int:
    """Numbers that the backward pass keeps of one layer's composed weight."""
    inner = spec.added.plain
    mixed = inner.blocks * inner.in_features * inner.rank if isinstance(inner, BlastSpec) else 0
    if spec.corrected:  # the correction's weight, and the sum
        return 2 * spec.dense_parameters + mixed
    plain = inner.structure in (LowRankSpec.structure, DenseSpec.structure)
    return 0 if plain else spec.dense_parameters + mixed


def is_told(source: Source) -> bool:
    """Whether the model in `source` can be healed, judged by its config."""
    named = str((source.config.get("architectures") or ["Model"])[0])
    reads = dimensions_of(source.config).vocabulary and not source.config.get("is_encoder_decoder")
    return bool(reads) and named.endswith(("ForCausalLM", "LMHeadModel", "Model"))


def planned(source: Source, plan: Plan, options: HealOptions, gpu: Gpu, gpus: int = 1) -> dict[str, Any]:
    """The forecast of healing, JSON-ready; `least` are the bytes of a GPU that it cannot do without."""
    specs = {layer.layer.module: layer.spec for layer in plan.layers}
    found = predicted(source, specs, options, gpu, GpuGroup(gpus))
    window = replace(options, batch=gpus * options.window, checkpointing=True)
    lowest = min(predicted(source, specs, window, gpu, GpuGroup(gpus)).total, found.total)
    trained = sum(masters(spec) for spec in specs.values())
    replaced = sum(layer.layer.entry.nbytes - layer.bits // 8 for layer in plan.layers)
    beside = {"least": lowest, "host": training_sizes.HOST_BYTES + SINGLE * trained}
    beside["disk"] = source.nbytes - replaced + kept_bytes(specs, source.entries, options)
    least, host, disk = map(amount, beside.values())
    more = f"; {least} at least, with --checkpointing; {host} of the host, {disk} of disk"
    said = words(found, gpu.name) + (more if found.fits else "")
    return {**asdict(found), **beside, "total": found.total, "fits": found.fits, "said": said}


def predicted(
    source: Source, specs: Mapping[str, Spec], options: HealOptions, gpu: Gpu, group: GpuGroup = ALONE
) -> Forecast:
    """The `forecast` for the dense model in `source`. Where it does not fit several GPUs, both models
    are divided over them, unless `options` forbid it or some layer is in few bits."""
    options = replace(options, window=min(options.window, context_of(source.config)))
    sizes = sizes_of(source.config, specs, source.parameters, options.train)
    if options.lora:
        sizes = replace(sizes, trained=added(specs, options.lora))
    found = forecast(sizes, specs, options, gpu, group)
    open_ = group.count > 1 and options.fsdp is None and not any(s.quantized for s in specs.values())
    if found.fits or not open_:
        return found
    return forecast(sizes, specs, options, gpu, replace(group, sharded=True))


def words(found: Forecast, gpu: str, speed: bool = True) -> str:
    """The forecast as one line, with the speed if it is asked for."""
    sizes = {"teacher": found.teacher, "trained parameters with their optimizer": found.trained}
    sizes |= {"composed weights": found.composed, "activations": found.activations}
    sizes |= {"logits": found.logits, "CUDA and fragments": RESERVED}
    parts = ", ".join(f"{name} {value / 1e9:,.1f}" for name, value in sizes.items())
    each = "" if found.gpus == 1 else f"each of {found.gpus} "
    room = f"the {FILLED * found.room / 1e9:,.0f} that may be filled of {each}{gpu}"
    need = f"{found.total / 1e9:,.1f} GB ({parts}) of {room}"
    if not found.fits:
        return f"healing does not fit: {need}; {REMEDY}"
    how = " with --fsdp" if found.sharded else ""
    how += (" and" if how else " with") + " --checkpointing" if found.checkpointing else ""
    pace, over = found.tokens_per_second, f"over {FASTEST:,.0f}"  # nobody has measured smaller models
    told = f", {f'about {pace:,.0f}' if pace <= FASTEST else over} tokens/s (predicted)" if speed else ""
    return f"healing{how}: {need}, {found.micro} windows a pass{told}"
