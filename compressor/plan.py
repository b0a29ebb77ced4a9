"""From a recipe and the headers of a checkpoint to what happens to each layer.

No weight is read and torch is not imported, except for a family without a table in `configs/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd, log

from blr.compressor.budget import Shape, fit_ranks
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import UsageError
from blr.compressor.families import Family, find_family
from blr.compressor.recipe import Recipe
from blr.compressor.structures.patterns import choose_patterns, parse_patterns, validate_chain
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)


@dataclass(frozen=True)
class Layer:
    """A compressible linear layer: its name on disk, reported type and stored weight."""

    module: str
    type: str
    entry: TensorEntry
    transposed: bool  # stored [in, out]

    @property
    def shape(self) -> Shape:
        """(out_features, in_features)."""
        rows, columns = self.entry.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class PlannedLayer:
    """What happens to one layer."""

    layer: Layer
    spec: Spec


@dataclass
class Plan:
    """What happens to a checkpoint: its replaced layers in order, and what must be said aloud."""

    layers: list[PlannedLayer]
    notes: list[str] = field(default_factory=list)

    @property
    def dense_parameters(self) -> int:
        """Of the replaced layers, before."""
        return sum(planned.spec.dense_parameters for planned in self.layers)

    @property
    def structured_parameters(self) -> int:
        """Of the replaced layers, after."""
        return sum(planned.spec.parameters for planned in self.layers)

    @property
    def cf(self) -> float:
        """Achieved compression factor of the replaced layers."""
        return self.dense_parameters / self.structured_parameters


def make_plan(source: Source, recipe: Recipe) -> Plan:
    """Choose a spec for every layer the recipe selects.

    Raises:
        UsageError: nothing matches, a rank or pattern that cannot be, a budget below one rank.
    """
    notes: list[str] = []
    layers = select(find_layers(source, recipe, notes), recipe)
    specs = _specs([layer.shape for layer in layers], recipe, notes)
    return Plan([PlannedLayer(layer, specs[layer.shape]) for layer in layers], notes)


def find_layers(source: Source, recipe: Recipe, notes: list[str]) -> list[Layer]:
    """Every compressible layer of `source`, in the order of its tensors."""
    family = find_family(source.config["model_type"])
    if family is None:
        from blr.compressor.modeling.discover import discover_family

        family = discover_family(source)
        notes.append(
            f"model type {source.config['model_type']!r} has no table in configs/: "
            f"compressing the {len(family.modules)} linear layers found in the model"
        )
    return [layer for entry in source.entries.values() if (layer := _layer(entry, family, recipe))]


def _layer(entry: TensorEntry, family: Family, recipe: Recipe) -> Layer | None:
    module, _, kind = entry.name.rpartition(".")
    if kind != "weight" or len(entry.shape) != 2 or not entry.is_float:
        return None
    layer_type = family.layer_type(module, include_heads=bool(recipe.include))
    return Layer(module, layer_type, entry, family.transposed) if layer_type else None


def select(layers: list[Layer], recipe: Recipe) -> list[Layer]:
    """The layers that `include` matches (all if empty) and `exclude` does not.

    Raises UsageError when that leaves none, or when a glob matches nothing.
    """
    names = [layer.module for layer in layers]
    for glob in (*recipe.include, *recipe.exclude):
        if not any(fnmatchcase(name, glob) for name in names):
            example = f", for example {names[0]!r}" if names else ""
            raise UsageError(
                f"the glob {glob!r} matches no compressible layer: globs match module names{example}"
            )
    chosen = [
        layer
        for layer in layers
        if (not recipe.include or _matches(layer.module, recipe.include))
        and not _matches(layer.module, recipe.exclude)
    ]
    if not chosen:
        raise UsageError("no layer is left to compress: loosen --include or --exclude")
    return chosen


def _matches(name: str, globs: list[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _specs(shapes: list[Shape], recipe: Recipe, notes: list[str]) -> dict[Shape, Spec]:
    if recipe.method == "ks":
        return {shape: _kronecker(shape, recipe, notes) for shape in dict.fromkeys(shapes)}
    blocks = {shape: _blocks(shape, recipe, notes) for shape in dict.fromkeys(shapes)}
    ranks = _ranks(shapes, blocks, recipe, notes)
    return {shape: _spec(shape, blocks[shape], ranks[shape], recipe) for shape in blocks}


def _kronecker(shape: Shape, recipe: Recipe, notes: list[str]) -> Spec:
    o, i = shape
    if recipe.pattern is not None:
        patterns = parse_patterns(recipe.pattern, i, o)
        validate_chain(patterns, i, o)
    else:
        choice = choose_patterns(i, o, recipe.cf)
        patterns = choice.patterns
        notes.append(f"{o}x{i}: {choice.reason}")
    return KroneckerSpec(i, o, patterns)


def _blocks(shape: Shape, recipe: Recipe, notes: list[str]) -> int:
    """The number of blocks: as asked, or the nearest that divides both dimensions."""
    if recipe.method == "svd":
        return 1
    wanted, common = recipe.target_blocks, gcd(*shape)
    divisors = [d for d in range(1, common + 1) if common % d == 0]
    nearest = min(divisors, key=lambda d: (abs(log(d / wanted)), d))
    if nearest != wanted:
        notes.append(f"{shape[0]}x{shape[1]}: {wanted} blocks do not divide it, using {nearest}")
    return nearest


def _ranks(
    shapes: list[Shape], blocks: dict[Shape, int], recipe: Recipe, notes: list[str]
) -> dict[Shape, int]:
    def cost(shape: Shape) -> int:
        return sum(shape) + (blocks[shape] ** 2 if recipe.method == "blast" else 0)

    def step(shape: Shape) -> int:
        return blocks[shape] if recipe.method == "monarch" else 1

    if recipe.rank is not None:
        return {shape: _fixed_rank(shape, step(shape), recipe.rank, notes) for shape in blocks}
    ranks = fit_ranks(shapes, recipe.cf, cost, step)
    for shape, rank in ranks.items():
        if rank < 1:
            most = shape[0] * shape[1] / (cost(shape) * step(shape))
            raise UsageError(
                f"cf {recipe.cf:g} leaves no rank for a {shape[0]}x{shape[1]} layer: "
                f"{recipe.method} can reach at most cf {most:.4g} there; lower --cf or --exclude it"
            )
    return ranks


def _fixed_rank(shape: Shape, step: int, wanted: int, notes: list[str]) -> int:
    most = min(shape)
    rank = min(max(wanted // step, 1) * step, most - most % step)
    if rank != wanted:
        notes.append(f"{shape[0]}x{shape[1]}: rank {wanted} is not possible, using {rank}")
    return rank


def _spec(shape: Shape, blocks: int, rank: int, recipe: Recipe) -> Spec:
    o, i = shape
    if recipe.method == "monarch":
        return MonarchSpec(i, o, blocks, rank // blocks)
    if recipe.method == "blast":
        return BlastSpec(i, o, blocks, rank)
    return LowRankSpec(i, o, rank)
