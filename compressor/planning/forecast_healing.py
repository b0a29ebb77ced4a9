"""What a healing run takes, predicted from headers alone: memory and time of every GPU.

A trained parameter takes 20 bytes: its bf16 copy and gradient, and in float32 master, gradient and two
moments. What is stored in few bits has its full numbers as masters, and those of its scales. With
several GPUs each takes its share of a batch; with --fsdp it holds a share of both models' blocks
(16 bytes of a trained parameter), too, and one block of either whole. The rest is the teacher, what
the backward pass needs of the tokens at once (`micro` windows), dense weights composed of factors
(`compose.py`), and a chunk of logits (`losses.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from blr.compressor.base.tables import amount
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.dimensions import Dimensions, dimensions_of
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.roofline import Gpu
from blr.compressor.planning.training_sizes import CHUNK, HALF, HOST_BYTES, SINGLE
from blr.compressor.recipe.heal_settings import HealOptions
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    LowRankSpec,
    Spec,
)

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
    """Of a model, with its parameters in all, and those trained."""

    parameters: int
    trained: int


@dataclass(frozen=True)
class Forecast:
    """Bytes on each of `gpus` devices by what they are for, with `micro` windows a pass."""

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
    """Of the dense model with `config`, whose layers `specs` replace, with `stored` parameters."""

    found = dimensions_of(config)
    table = found.vocabulary * found.width
    dense = sum(spec.dense_parameters for spec in specs.values())
    trained = sum(masters(spec) for spec in specs.values()) if "factors" in train else 0
    trained += table * (("embeddings" in train) + ("head" in train and not found.tied))
    return Sizes(**vars(found), parameters=max(stored, dense + found.tables), trained=trained)


def disk_bytes(source: Source, specs: Mapping[str, Spec], options: HealOptions, own: int) -> int:
    """Upper estimate of the bytes on disk of a run on `source` with `own` tokens of own text."""
    found = sum(path.stat().st_size for path in source.folder.iterdir() if path.is_file())
    stored = sum(entry.nbytes for entry in source.entries.values())
    files = stored + max(found - stored, 0) + SMALL
    return files + OWN * own + kept_bytes(specs, source.entries, options)


def kept_bytes(
    specs: Mapping[str, Spec], entries: Mapping[str, TensorEntry], options: HealOptions
) -> int:
    """Most bytes on disk of a training's state and of the tensors that it gives."""
    floats = [entry for entry in entries.values() if entry.is_float]
    trained = sum(masters(spec) for spec in specs.values()) if "factors" in options.train else 0
    if options.lora:
        trained = options.lora * sum(spec.in_features + spec.out_features for spec in specs.values())
    if {"norms", "biases"} & {*options.train}:
        trained += sum(entry.parameters for entry in floats if len(entry.shape) == 1)
    if {"dense", "embeddings", "head"} & {*options.train}:
        trained += sum(e.parameters for e in floats if e.name.rpartition(".")[0] not in specs)
    once = options.minutes is not None and options.minutes < options.save_minutes / 2
    states = 1 if once else 2  # a second one is written before it takes the first one's place
    return (states * KEPT + SINGLE) * trained


def masters(spec: Spec) -> int:
    """Numbers that are trained of a layer: of those in few bits all, and the scales but of float8."""
    scales = 0
    for _, leaf in spec.parts():
        if (packing := leaf.packing) is not None and not packing.fp8:
            formats = ((prod(shape), packing.format_of(name)) for name, shape in leaf.shapes().items())
            scales += sum(-(-numbers // form[1]) for numbers, form in formats if form is not None)
    return spec.parameters + scales


@dataclass(frozen=True)
class GpuGroup:
    """The GPUs of a run: how many, each of `room` bytes (None: those of its kind), and whether both
    models are shared out over them."""

    count: int = 1
    sharded: bool = False
    room: float | None = None


ALONE = GpuGroup()


def forecast(
    sizes: Sizes, specs: Mapping[str, Spec], options: HealOptions, gpu: Gpu, group: GpuGroup = ALONE
) -> Forecast:
    """What fits best: as many windows a pass as do, with checkpointing where fewer than `FEW` would."""
    window = options.window
    windows = max(1, options.batch // window) if options.batch else WINDOWS
    windows = -(-windows // group.count)
    group = replace(group, room=group.room or gpu.memory_gb * 1e9)
    found = None
    for kept in [False, True] if options.checkpointing is None else [options.checkpointing]:
        micro, least = windows, 1 if kept or options.checkpointing is False else min(FEW, windows)
        while micro >= least:
            step = StepSize(window, windows, micro, kept, options.matches_states)
            found = _forecast(sizes, specs, step, gpu, group)
            if found.fits:
                return found
            micro //= 2
    assert found is not None
    return found


@dataclass(frozen=True)
class StepSize:
    """Of one GPU: `windows` of `window` tokens, `micro` of them a pass; whether the blocks' inputs
    alone are `kept`, and whether the outputs of both models' blocks are there (`states`)."""

    window: int
    windows: int
    micro: int
    kept: bool
    states: bool


def _forecast(
    sizes: Sizes, specs: Mapping[str, Spec], step: StepSize, gpu: Gpu, group: GpuGroup
) -> Forecast:
    tokens, kept = step.micro * step.window, step.kept
    composed = sum(_composed(spec) for spec in specs.values()) * HALF
    inputs = tokens * sizes.width * HALF * sizes.blocks
    shared = sizes.blocks if not kept else 1  # blocks whose insides are held at once
    speed = _speed(sizes, specs, step, gpu)
    teacher, trained = _models(sizes, specs, group)
    return Forecast(
        teacher=teacher,
        trained=trained,
        composed=composed / sizes.blocks * shared,
        activations=tokens * (_inside(sizes) * shared + 2 * sizes.width * SINGLE)
        + inputs * (kept + step.states),
        logits=min(CHUNK, tokens * sizes.vocabulary) * LOGIT,
        micro=step.micro,
        checkpointing=kept,
        room=group.room or 0.0,
        tokens_per_second=speed * (group.count * TOGETHER if group.count > 1 else 1),
        gpus=group.count,
        sharded=group.sharded,
    )


def _speed(sizes: Sizes, specs: Mapping[str, Spec], step: StepSize, gpu: Gpu) -> float:
    """Tokens a second of one GPU: the time of a token's products and bytes, and its part of a step's."""
    products = _flops(sizes, specs, step.kept) / (EFFICIENCY * gpu.reached_tflops * 1e12)
    moved = MOVED * _inside(sizes) * sizes.blocks + LOGIT * sizes.vocabulary
    tokens, bandwidth = step.windows * step.window, gpu.copy_tbps * 1e12
    update = 2 * TRAINED * sizes.trained / bandwidth
    return 1 / (products + moved / bandwidth + (update + HOST) / tokens)


def _inside(sizes: Sizes) -> float:
    """Bytes that a block keeps of a token."""
    return (WIDE * sizes.width + MIDDLE * sizes.middle) * HALF


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
    """Numbers that the backward pass of one layer's weight keeps."""
    inner = spec.added.plain
    mixed = inner.blocks * inner.in_features * inner.rank if isinstance(inner, BlastSpec) else 0
    if spec.corrected:  # the correction's weight, and the sum
        return 2 * spec.dense_parameters + mixed
    plain = inner.low_rank().structure in (LowRankSpec.structure, DenseSpec.structure)
    return 0 if plain else spec.dense_parameters + mixed


def _flops(sizes: Sizes, specs: Mapping[str, Spec], kept: bool) -> float:
    """Operations a token: of the teacher once, of the student forward and twice that back."""
    plain = (spec.plain for spec in specs.values())
    low = (spec for spec in plain if spec.low_rank().structure == LowRankSpec.structure)
    saved = sum(spec.dense_parameters - spec.parameters for spec in low)
    return 2.0 * (sizes.parameters + (sizes.parameters - saved) * (4 if kept else 3))


def is_told(source: Source) -> bool:
    """Whether healing is for a model such as in `source`, as far as its config tells."""
    named = str((source.config.get("architectures") or ["Model"])[0])
    reads = dimensions_of(source.config).vocabulary and not source.config.get("is_encoder_decoder")
    return bool(reads) and named.endswith(("ForCausalLM", "LMHeadModel", "Model"))


def planned(source: Source, plan: Plan, options: HealOptions, gpu: Gpu, gpus: int = 1) -> dict[str, Any]:
    """What healing would take, JSON-ready; `least` are bytes of a GPU that it cannot do without."""
    specs = {layer.layer.module: layer.spec for layer in plan.layers}
    found = predicted(source, specs, options, gpu, GpuGroup(gpus))
    window = replace(options, batch=gpus * options.window, checkpointing=True)
    least = min(predicted(source, specs, window, gpu, GpuGroup(gpus)).total, found.total)
    trained = sum(masters(spec) for spec in specs.values())
    beside = {"least": least, "host": HOST_BYTES + SINGLE * trained}
    stored = sum(entry.nbytes for entry in source.entries.values())
    replaced = sum(layer.layer.entry.nbytes - layer.bits // 8 for layer in plan.layers)
    beside["disk"] = stored - replaced + kept_bytes(specs, source.entries, options)
    said = words(found, gpu.name) + (_beside(beside) if found.fits else "")
    return {**asdict(found), **beside, "total": found.total, "fits": found.fits, "said": said}


def _beside(sizes: Mapping[str, float]) -> str:
    least, host, disk = (amount(sizes[name]) for name in ("least", "host", "disk"))
    return f"; {least} at least, with --checkpointing; {host} of the host, {disk} of disk"


def predicted(
    source: Source, specs: Mapping[str, Spec], options: HealOptions, gpu: Gpu, group: GpuGroup = ALONE
) -> Forecast:
    """As `forecast`, for the dense model in `source`; where it does not fit several GPUs, shared out
    over them, unless `options` forbid it or some layer is packed."""
    options = replace(options, window=min(options.window, context_of(source.config)))
    stored = sum(entry.parameters for entry in source.entries.values())
    sizes = sizes_of(source.config, specs, stored, options.train)
    if options.lora:
        added = options.lora * sum(spec.in_features + spec.out_features for spec in specs.values())
        sizes = replace(sizes, trained=added)
    found = forecast(sizes, specs, options, gpu, group)
    open_ = group.count > 1 and options.fsdp is None and not any(s.quantized for s in specs.values())
    if found.fits or not open_:
        return found
    return forecast(sizes, specs, options, gpu, replace(group, sharded=True))


def words(found: Forecast, gpu: str, speed: bool = True) -> str:
    """One line that says it, with the `speed` if it is asked for."""
    parts = ", ".join(
        f"{name} {value / 1e9:,.1f}"
        for name, value in (
            ("teacher", found.teacher),
            ("trained parameters with their optimizer", found.trained),
            ("composed weights", found.composed),
            ("activations", found.activations),
            ("logits", found.logits),
            ("CUDA and fragments", RESERVED),
        )
    )
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
