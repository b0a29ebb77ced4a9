"""Decides from a recipe and a checkpoint's headers what happens to each layer, without torch. Bits that
layers share (`bpw`) go where they save the largest predicted loss: rounding a layer costs what its
sensitivity says of errors in all directions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, sqrt

from blr.compressor.base.device import BYTES
from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.assign import Assigned, Assigner, Curves, Task
from blr.compressor.planning.layers import Layer, check_stacks, find_layers, select, stored_spec
from blr.compressor.planning.rank_caches import KINDS as CACHED_KINDS
from blr.compressor.planning.rank_caches import cache_notes, cached_settings
from blr.compressor.recipe.architectures import SIBLINGS
from blr.compressor.recipe.schema import DENSE, FORMER, NONE, LayerSettings, Recipe
from blr.compressor.structures.specs import DenseSpec, Spec

# The least mean squared error of rounding a normal number of variance 1 to so many bits (Max, 1960)
ROUNDING = {2: 0.1175, 3: 0.03454, 4: 0.009497}
LARGEST = 64  # rank
CORRECTED = 1.5  # a correction of the share x of a layer's parameters leaves exp(-1.5 √x), as measured


@dataclass(frozen=True)
class PlannedLayer:
    """What happens to one layer, and by which `rule`; `width` is the bits of an unpacked number."""

    layer: Layer
    spec: Spec
    solver: str | None = None
    rounds: int | None = None
    rule: str = ""
    width: int = 16

    @property
    def bits(self) -> int:
        return self.spec.stored_bits(self.width)


@dataclass
class Plan:
    """What happens to a checkpoint: the replaced layers in order, notes for the user, the layers kept
    dense on purpose, the `whole` of it (None without weights), and what a cache of ranks holds."""

    layers: list[PlannedLayer]
    notes: list[str] = field(default_factory=list)
    kept: list[PlannedLayer] = field(default_factory=list)
    whole: Source | None = None
    kv_cache: str | None = None

    @property
    def dense_parameters(self) -> int:
        """The parameters before, of all layers that count in the factor."""
        return sum(planned.spec.dense_parameters for planned in [*self.layers, *self.kept])

    @property
    def structured_parameters(self) -> int:
        """The parameters after, of all layers that count in the factor."""
        return sum(planned.spec.parameters for planned in [*self.layers, *self.kept])

    @property
    def cf(self) -> float:
        return self.dense_parameters / self.structured_parameters

    @property
    def bits(self) -> float:
        """The stored bits of these layers for each of their dense parameters."""
        return sum(planned.bits for planned in [*self.layers, *self.kept]) / self.dense_parameters

    @property
    def share(self) -> float | None:
        """The share of the checkpoint's parameters that is in replaced layers; None without weights."""
        if self.whole is None:
            return None
        return sum(planned.spec.dense_parameters for planned in self.layers) / self.whole.parameters


def make_plan(
    source: Source, recipe: Recipe, curves: Curves | None = None, calibrated: bool = False
) -> Plan:
    """Choose a spec for every layer that the recipe selects, from headers. `curves` are the predicted
    losses that each further rank saves, by module (empty: uniform ranks); `calibrated`: fits will be
    weighted by activations. Raises UsageError."""
    notes = [f"method {name} is {FORMER[name]}, which it always chose" for name in recipe.former_methods]
    found = find_layers(source, recipe, notes)
    layers = select(found, recipe, source)
    cached = cached_settings(layers, recipe, curves or {})
    tasks = [_task(layer, recipe, cached) for layer in layers]
    fixed, kept = _dense(tasks, notes)
    done = {planned.layer.module for planned in [*fixed, *kept]}
    assigner = Assigner(recipe, curves or {}, calibrated, notes)
    structured = [assigner.shaped(task) for task in tasks if task.layer.module not in done]
    if recipe.allocation != "uniform":
        structured = shared_bits(structured, curves or {})
    assigned = _assign(structured, [*fixed, *kept], assigner)
    planned = {p.layer.module: p for p in fixed}
    for task in structured:
        planned[task.layer.module] = _planned(task, *assigned[task.layer.module], notes)
    ordered = [planned[layer.module] for layer in layers if layer.module in planned]
    if not ordered:
        raise UsageError("every layer is kept as it is; give a rule another method, or quantize")
    check_stacks(found, planned)
    whole = source if source.shards else None  # else an outline
    plan = Plan(ordered, notes, kept, whole, _kv_cache(recipe, ordered))
    notes += _grown(ordered)
    if not curves and recipe.allocation != "sensitivity":
        notes += cache_notes(plan, {}, 0)
    return plan


def _grown(layers: list[PlannedLayer]) -> list[str]:
    """A note if layers become larger than they were, as with ranks meant for a larger model."""
    factor = sum(layer.bits for layer in layers) / sum(8 * layer.layer.entry.nbytes for layer in layers)
    if factor <= 1:
        return []
    return [f"these layers become {factor:.2f} times larger than they are: give a smaller rank, or --cf"]


def unmeasured(recipe: Recipe, calibrated: bool) -> list[str]:
    """Notes on the ranks of a plan that is made from headers alone."""
    if not calibrated:
        asked = recipe.allocation == "sensitivity"
        return ["allocation: sensitivity needs calibration, these ranks are uniform"] * asked
    shared = recipe.allocation != "uniform" and (recipe.sized_by_cf or recipe.bpw is not None)
    return ["ranks are uniform here: calibration measures where they are worth most"] * shared


def _task(layer: Layer, recipe: Recipe, cached: dict[str, LayerSettings]) -> Task:
    width = 8 * BYTES[recipe.dtype] if recipe.dtype else layer.width
    return Task(layer, cached.get(layer.module) or recipe.settings_for(layer.module), width=width)


def _kv_cache(recipe: Recipe, layers: list[PlannedLayer]) -> str | None:
    """What the checkpoint says of its cache. Raises UsageError if no layer makes keys and values."""
    if not recipe.caches_ranks:
        return None
    if not any(planned.layer.type in CACHED_KINDS for planned in layers):
        owners = "decoders with k and v projections or GPT-2's c_attn"
        raise UsageError(f"kv_rank and kv_cf are for {owners}; leave them out")
    return "ranks" if recipe.kv_quantize in (None, NONE) else recipe.kv_quantize


def _dense(tasks: list[Task], notes: list[str]) -> tuple[list[PlannedLayer], list[PlannedLayer]]:
    """The layers in few bits without a structure, and those kept. Raises UsageError if all are kept."""
    fixed, kept = [], []
    for task in tasks:
        if task.settings.method != DENSE:
            continue
        layer, (o, i) = task.layer, task.layer.shape
        spec = stored_spec(DenseSpec(i, o), task.settings.stored, task.width)
        if spec.packing is not None:
            fixed.append(PlannedLayer(layer, spec, rule=task.decided("dense"), width=task.width))
            continue
        kept.append(PlannedLayer(layer, spec, rule=task.decided("kept dense"), width=layer.width))
        if task.settings.stored.bits:
            _say_large(task, notes)
    if len(kept) == len(tasks) and any(task.settings.stored.bits for task in tasks):
        raise UsageError(f"{notes[-1]}; no layer is left: take a smaller --group")
    return fixed, kept


def _say_large(task: Task, notes: list[str]) -> None:
    (o, i), stored = task.layer.shape, task.settings.stored
    groups = f"groups of {stored.group}" if stored.group else "rows"
    note = f"{o}x{i}: in {stored.kind} and {groups} no smaller, not packed"
    notes.extend([note] if note not in notes else [])


def _assign(tasks: list[Task], dense_layers: list[PlannedLayer], assigner: Assigner) -> Assigned:
    """The specs of layers that get a structure. Dense layers count in the budget; corrections do not."""
    correcting = [task for task in tasks if task.settings.stored.base is not None]
    others = [task for task in tasks if task.settings.stored.base is None]
    dense = sum(planned.spec.parameters for planned in dense_layers)
    budget = (sum(task.size for task in others) + dense) / assigner.recipe.cf - dense
    return assigner.assign(correcting, 0) | assigner.assign(others, budget if others else 0)


def _planned(task: Task, spec: Spec, rule: str, notes: list[str]) -> PlannedLayer:
    settings = task.settings
    stored = stored_spec(spec, settings.stored, task.width)
    if stored is spec and settings.stored.bits:
        _say_large(task, notes)
    return PlannedLayer(task.layer, stored, settings.solver, settings.rounds, rule, task.width)


@dataclass(frozen=True)
class LayerBits:
    """One way to store a layer: it takes `bits` in all, and loses about `loss`."""

    base: int
    rank: int
    bits: float
    loss: float


def shared_bits(tasks: Sequence[Task], curves: Curves) -> list[Task]:
    """The tasks with a base and a rank in place of `bpw`, where sensitivities are known."""
    shared: dict[object, list[int]] = {}
    for n, task in enumerate(tasks):
        stored = task.settings.stored
        known = task.layer.module in curves and stored.base in ROUNDING and not stored.superblocks
        if known and task.bpw is not None:
            shared.setdefault((task.settings.rule, task.bpw), []).append(n)
    done = list(tasks)
    for numbers in shared.values():
        alike: dict[str, list[int]] = {}
        for n in numbers:
            alike.setdefault(_together(tasks[n]), []).append(n)
        budget = sum(tasks[n].size * (tasks[n].bpw or 0) for n in numbers)
        options = [_options([tasks[n] for n in members], curves) for members in alike.values()]
        for members, choice in zip(alike.values(), _chosen(options, budget), strict=False):
            for n in members:
                done[n] = _stored(tasks[n], choice.base, choice.rank)
    return done


def _together(task: Task) -> str:
    """A name for the layers that are stored alike: those of one input, which kernels and engines take
    together, and experts of one stack."""
    home, _, name = task.layer.module.rpartition(".")
    if task.layer.stack:
        return f"{home.rpartition('.')[0]}.{task.layer.stack}"
    number = next((n for n, names in enumerate(SIBLINGS) if name in names), name)
    return f"{home}.{number}"


def _stored(task: Task, base: int, rank: int) -> Task:
    settings = task.settings
    stored = replace(settings.stored, base=base, bpw=None)
    rule = f"{settings.rule}, int{base} by sensitivity"
    return replace(task, settings=replace(settings, rank=rank, stored=stored, rule=rule))


def _options(tasks: Sequence[Task], curves: Curves) -> list[LayerBits]:
    least, options = min(tasks, key=lambda task: task.most), list[LayerBits]()
    for base in (bits for bits in ROUNDING if bits >= (least.settings.stored.base or 0)):
        for rank in (rank for rank in least.corrections if rank <= LARGEST):
            bits = sum(_stored(task, base, rank).bits(rank) * task.size for task in tasks)
            loss = sum(_loss(task, base, rank, curves[task.layer.module]) for task in tasks)
            options.append(LayerBits(base, rank, bits, loss))
    return options


def _loss(task: Task, base: int, rank: int, curve: Sequence[float]) -> float:
    """The predicted loss of a layer, up to a factor: of an error that is alike in all directions."""
    noise = sum(sqrt(max(value, 0.0)) for value in curve) ** 2 / len(curve)
    return noise * ROUNDING[base] * exp(-CORRECTED * sqrt(rank * task.cost / task.size))


def _chosen(options: Sequence[Sequence[LayerBits]], budget: float) -> list[LayerBits]:
    """The choices of the least loss that take at most `budget` bits in all; none if there are none."""

    def at(price: float) -> list[LayerBits]:
        return [min(ways, key=lambda way: way.loss + price * way.bits) for ways in options]

    low, high = 1e-30, 1e30
    for _ in range(100):
        price = sqrt(low * high)
        fits = sum(way.bits for way in at(price)) <= budget
        low, high = (low, price) if fits else (price, high)
    found = at(high)
    left = budget - sum(way.bits for way in found)
    if left < 0:
        return []
    for n in sorted(range(len(found)), key=lambda n: -found[n].loss):  # what is left, where most is lost
        fitting = [way for way in options[n] if way.bits <= found[n].bits + left]
        best = min(fitting, key=lambda way: way.loss)
        left, found[n] = left + found[n].bits - best.bits, best
    return found
