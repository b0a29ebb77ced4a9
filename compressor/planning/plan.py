"""Decides from a recipe and a checkpoint's headers what happens to each layer.

No weight is read and torch is not imported, except for a family without a table in `configs/`.
"""

from dataclasses import dataclass, field

from blr.compressor.base.device import BYTES
from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.assign import Assigned, Assigner, Curves, Task
from blr.compressor.planning.bits import shared_bits
from blr.compressor.planning.experts import check_whole
from blr.compressor.planning.layers import Layer, find_layers, select, stored_spec
from blr.compressor.planning.rank_caches import KINDS as CACHED_KINDS
from blr.compressor.planning.rank_caches import Cached, cache_notes
from blr.compressor.recipe.schema import DENSE, FORMER, NONE, Recipe
from blr.compressor.structures.specs import DenseSpec, Spec

__all__ = ["KeptLayer", "Layer", "Plan", "PlannedLayer", "make_plan"]


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


@dataclass(frozen=True)
class KeptLayer:
    """A layer that a rule keeps dense; it counts in the compression factor."""

    layer: Layer
    rule: str

    @property
    def bits(self) -> int:
        return 8 * self.layer.entry.nbytes

    @property
    def parameters(self) -> int:
        return self.layer.entry.parameters


@dataclass(frozen=True)
class Whole:
    """The size of a checkpoint: parameters and bytes of all its tensors."""

    parameters: int
    nbytes: int


@dataclass
class Plan:
    """What happens to a checkpoint: the replaced layers in order, notes for the user, the layers kept
    dense on purpose, the size of the whole (None without weights), and what a cache of ranks holds."""

    layers: list[PlannedLayer]
    notes: list[str] = field(default_factory=list)
    kept: list[KeptLayer] = field(default_factory=list)
    whole: Whole | None = None
    kv_cache: str | None = None

    @property
    def dense_parameters(self) -> int:
        """The parameters before, of all layers that count in the factor."""
        return sum(planned.spec.dense_parameters for planned in self.layers) + self._kept

    @property
    def structured_parameters(self) -> int:
        """The parameters after, of all layers that count in the factor."""
        return sum(planned.spec.parameters for planned in self.layers) + self._kept

    @property
    def cf(self) -> float:
        """The compression factor that these layers reach."""
        return self.dense_parameters / self.structured_parameters

    @property
    def bits(self) -> float:
        """The stored bits of these layers for each of their dense parameters."""
        stored = sum(layer.bits for layer in self.layers) + sum(layer.bits for layer in self.kept)
        return stored / self.dense_parameters

    @property
    def share(self) -> float | None:
        """The share of the checkpoint's parameters that is in replaced layers; None without weights."""
        if self.whole is None:
            return None
        return sum(planned.spec.dense_parameters for planned in self.layers) / self.whole.parameters

    @property
    def _kept(self) -> int:
        return sum(kept.parameters for kept in self.kept)


def make_plan(
    source: Source, recipe: Recipe, curves: Curves | None = None, calibrated: bool = False
) -> Plan:
    """Choose a spec for every layer that the recipe selects, from headers. `curves` are the predicted
    losses that each further rank saves, by module (empty: uniform ranks); `calibrated`: fits will be
    weighted by activations. Raises UsageError."""
    notes = [f"method {name} is {FORMER[name]}, which it always chose" for name in recipe.former_methods]
    found = find_layers(source, recipe, notes)
    layers = select(found, recipe, source)
    cached = Cached(layers, recipe, curves or {})
    tasks = [_task(layer, recipe, cached) for layer in layers]
    fixed, kept = _dense(tasks, notes)
    done = {p.layer.module for p in fixed} | {layer.layer.module for layer in kept}
    assigner = Assigner(recipe, curves or {}, calibrated, notes)
    structured = [assigner.shaped(task) for task in tasks if task.layer.module not in done]
    if recipe.allocation != "uniform":
        structured = shared_bits(structured, curves or {})
    assigned = _assign(structured, fixed, kept, assigner)
    planned = {p.layer.module: p for p in fixed}
    for task in structured:
        planned[task.layer.module] = _planned(task, *assigned[task.layer.module], notes)
    ordered = [planned[layer.module] for layer in layers if layer.module in planned]
    if not ordered:
        raise UsageError("every layer is kept as it is; give a rule another method, or quantize")
    check_whole(((layer.module, layer.stack) for layer in found if layer.stack), planned)
    plan = Plan(ordered, notes, kept, _whole(source), _kv_cache(recipe, ordered))
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


def _task(layer: Layer, recipe: Recipe, cached: Cached) -> Task:
    width = 8 * BYTES[recipe.dtype] if recipe.dtype else 8 * layer.entry.nbytes // layer.entry.parameters
    settings = cached.settings(layer, recipe.settings_for(layer.module))
    return Task(layer, settings, width=width)


def _kv_cache(recipe: Recipe, layers: list[PlannedLayer]) -> str | None:
    """What the checkpoint says of its cache. Raises UsageError if no layer makes keys and values."""
    if not recipe.caches_ranks:
        return None
    if not any(planned.layer.type in CACHED_KINDS for planned in layers):
        raise UsageError(
            "kv_rank and kv_cf are for decoders with k and v projections or GPT-2's c_attn; leave "
            "them out"
        )
    return "ranks" if recipe.kv_quantize in (None, NONE) else recipe.kv_quantize


def _dense(tasks: list[Task], notes: list[str]) -> tuple[list[PlannedLayer], list[KeptLayer]]:
    """The layers that are stored in few bits without a structure, and those kept dense. Raises
    UsageError if none becomes smaller."""
    fixed, kept = [], []
    for task in tasks:
        if task.settings.method != DENSE:
            continue
        o, i = task.layer.shape
        spec = stored_spec(DenseSpec(i, o), task.settings.stored, task.width)
        if spec.packing is not None:
            fixed.append(PlannedLayer(task.layer, spec, rule=task.decided("dense"), width=task.width))
            continue
        kept.append(KeptLayer(task.layer, task.decided("kept dense")))
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


def _assign(
    tasks: list[Task], fixed: list[PlannedLayer], kept: list[KeptLayer], assigner: Assigner
) -> Assigned:
    """The specs of layers that get a structure. Dense layers count in the budget; corrections do not."""
    correcting = [task for task in tasks if task.settings.stored.base is not None]
    others = [task for task in tasks if task.settings.stored.base is None]
    dense = sum(p.spec.parameters for p in fixed) + sum(layer.parameters for layer in kept)
    budget = (sum(task.size for task in others) + dense) / assigner.recipe.cf - dense
    return assigner.assign(correcting, 0) | assigner.assign(others, budget if others else 0)


def _whole(source: Source) -> Whole | None:
    if not source.shards:
        return None  # an outline
    entries = source.entries.values()
    return Whole(sum(e.parameters for e in entries), sum(e.nbytes for e in entries))


def _planned(task: Task, spec: Spec, rule: str, notes: list[str]) -> PlannedLayer:
    """The layer as it is stored: packed if that takes fewer bits."""
    settings = task.settings
    stored = stored_spec(spec, settings.stored, task.width)
    if stored is spec and settings.stored.bits:
        _say_large(task, notes)
    return PlannedLayer(task.layer, stored, settings.solver, settings.rounds, rule, task.width)
