"""From a recipe and the headers of a checkpoint to what happens to each layer.

No weight is read and torch is not imported, except for a family without a table in `configs/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.assign import Assigner, Curves, Task
from blr.compressor.planning.layers import Layer, find_layers, select
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures.specs import Spec

__all__ = ["KeptLayer", "Layer", "Plan", "PlannedLayer", "make_plan"]


@dataclass(frozen=True)
class PlannedLayer:
    """What happens to one layer.

    `solver` and `rounds` are those of its rule (None: the family's default); `rule` says in words
    why this structure and size.
    """

    layer: Layer
    spec: Spec
    solver: str | None = None
    rounds: int | None = None
    rule: str = ""


@dataclass(frozen=True)
class KeptLayer:
    """A layer that a rule or `auto` leaves dense; it counts in the compression factor."""

    layer: Layer
    rule: str

    @property
    def parameters(self) -> int:
        """Of the dense weight."""
        return self.layer.entry.parameters


@dataclass(frozen=True)
class Whole:
    """All tensors of a checkpoint together: how many parameters, in how many bytes."""

    parameters: int
    nbytes: int


@dataclass
class Plan:
    """What happens to a checkpoint: replaced layers in order, those kept dense on purpose, and
    what must be said aloud. `whole` is the checkpoint's size, None where there are no weights."""

    layers: list[PlannedLayer]
    notes: list[str] = field(default_factory=list)
    kept: list[KeptLayer] = field(default_factory=list)
    whole: Whole | None = None

    @property
    def dense_parameters(self) -> int:
        """Of all layers that the factor counts, before."""
        return sum(planned.spec.dense_parameters for planned in self.layers) + self._kept

    @property
    def structured_parameters(self) -> int:
        """Of all layers that the factor counts, after."""
        return sum(planned.spec.parameters for planned in self.layers) + self._kept

    @property
    def cf(self) -> float:
        """Achieved compression factor of these layers."""
        return self.dense_parameters / self.structured_parameters

    @property
    def share(self) -> float | None:
        """Of the checkpoint's parameters, how many are in replaced layers; None if it has no weights."""
        if self.whole is None:
            return None
        return sum(planned.spec.dense_parameters for planned in self.layers) / self.whole.parameters

    @property
    def _kept(self) -> int:
        return sum(kept.parameters for kept in self.kept)


def make_plan(
    source: Source, recipe: Recipe, curves: Curves | None = None, calibrated: bool = False
) -> Plan:
    """Choose a spec for every layer the recipe selects.

    Args:
        source: headers and configuration are all that is read.
        recipe: resolved.
        curves: module to the predicted loss that each further rank saves (falling), if measured;
            without them ranks are uniform.
        calibrated: the fits will be weighted by activations.

    Raises:
        UsageError: nothing matches, a rank or pattern that cannot be, a budget out of reach.
    """
    notes: list[str] = []
    layers = select(find_layers(source, recipe, notes), recipe, source)
    tasks = [Task(layer, recipe.settings_for(layer.module)) for layer in layers]
    tasks = _decide(tasks, recipe, curves or {}, calibrated, notes)
    if recipe.allocation == "sensitivity" and not curves:
        notes.append("allocation: sensitivity needs calibration, these ranks are uniform")
    kept = [
        KeptLayer(task.layer, task.decided("kept dense"))
        for task in tasks
        if task.settings.method == "dense"
    ]
    replaced = [task for task in tasks if task.settings.method != "dense"]
    budget = sum(task.size for task in tasks) / recipe.cf - sum(layer.parameters for layer in kept)
    assigned = Assigner(recipe, curves or {}, calibrated, notes).assign(replaced, budget)
    planned = [_planned(task, *assigned[task.layer.module]) for task in replaced]
    return Plan(planned, notes, kept, _whole(source))


def _whole(source: Source) -> Whole | None:
    if not source.shards:
        return None  # an outline
    entries = source.entries.values()
    return Whole(sum(e.parameters for e in entries), sum(e.nbytes for e in entries))


def _decide(
    tasks: list[Task], recipe: Recipe, curves: Curves, calibrated: bool, notes: list[str]
) -> list[Task]:
    """Put a method in the place of every `auto`."""
    if all(task.settings.method != "auto" for task in tasks):
        return tasks
    from blr.compressor.planning.auto import choose_methods

    return choose_methods(tasks, recipe, curves, calibrated, notes)


def _planned(task: Task, spec: Spec, rule: str) -> PlannedLayer:
    return PlannedLayer(task.layer, spec, task.settings.solver, task.settings.rounds, rule)
