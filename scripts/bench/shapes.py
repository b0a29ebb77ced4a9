"""Which layers are timed in which structures: configs/bench-shapes.yaml and ranks. No torch.

The published rank stands for the published blocks at the published compression factor; every other
rank is the largest within the budget that is a multiple of 16, which kernels like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

from blr.bench.checks import find_precision
from blr.bench.options import LayerOptions
from blr.compressor.base.errors import UsageError
from blr.compressor.planning.budget import Item
from blr.compressor.recipe.architectures import read_config_table
from blr.compressor.structures.patterns import choose_patterns
from blr.compressor.structures.registry import STRUCTURES, LayerSizes
from blr.compressor.structures.specs import KroneckerSpec, Spec
from blr.kernels.common.names import FOLDERS

LARGE, SMALL = (("llama-7b",), (1, 1024, 4096)), (("gpt2-s",), (1, 64))  # models and tokens; on a CPU
TUNED = tuple(FOLDERS)  # structures whose kernels have variants to choose from
SWEEP = (4, 8, 16)  # blocks of BLAST beside the published ones
MONARCH_BLOCKS = 16  # where nothing is published
RANK_STEP = 16
LEFT = 0.05  # of a budget


@dataclass(frozen=True)
class LayerShape:
    """One layer shape: `published` maps a structure to a rank (svd) or to (rank, blocks)."""

    model: str
    name: str
    in_features: int
    out_features: int
    cf: float
    published: dict[str, Any]

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.model} {self.name} {self.in_features}→{self.out_features}"

    def published_rank(self, structure: str, blocks: int) -> int | None:
        """The published rank of a structure with so many blocks, if there is one."""
        found = self.published.get(structure)
        if not isinstance(found, list | tuple):
            return found
        return found[0] if found[1] == blocks else None


@cache
def known_models() -> dict[str, tuple[LayerShape, ...]]:
    """All models of configs/bench-shapes.yaml by name."""
    tables = read_config_table("bench-shapes.yaml")
    return {model: tuple(_layers(model, table)) for model, table in tables.items()}


def find_layers(models: Sequence[str]) -> list[LayerShape]:
    """The layers of `models`. Raises UsageError listing the known ones."""
    known = known_models()
    for model in models:
        if model.lower() not in known:
            names = ", ".join(known)
            raise UsageError(f"model {model!r} is not in configs/bench-shapes.yaml; known: {names}")
    return [layer for model in models for layer in known[model.lower()]]


def check_structures(structures: Sequence[str], known: Sequence[str] = TUNED) -> None:
    """Raises UsageError unless all are names of `known` ones, by default those with kernels to tune."""
    if wrong := next((name for name in structures if name not in known), None):
        raise UsageError(f"structure {wrong!r} is unknown; expected some of {', '.join(known)}")


def specs_for(
    layer: LayerShape, structures: Sequence[str], blocks: Sequence[int] = (), cf: float | None = None
) -> list[Spec]:
    """The specs to time for one layer, structures (of `STRUCTURES`) in the given order.

    Args:
        blocks: b of Monarch and BLAST; none: the published b, for BLAST also 4, 8 and 16, for
            Monarch 16 where nothing is published. Those that do not divide the layer are left out.
        cf: compression factor in place of the published one.
    """
    factor = layer.cf if cf is None else cf
    found = []
    for name in structures:
        each = [1] if STRUCTURES[name].blocks is None else _blocks(layer, name, blocks)
        found += [_spec(layer, name, b, factor) for b in each]
    return found


@dataclass(frozen=True)
class LayerWork:
    """The layers that options name. `specs`: of each layer."""

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    specs: tuple[tuple[LayerShape, list[Spec]], ...]


def layer_work(options: LayerOptions, cpu: bool) -> LayerWork:
    """Small models by default on a CPU. Raises UsageError for what there is not."""
    find_precision(options.dtype)
    asked = options.structures or (() if options.bits else TUNED)
    check_structures(asked, list(STRUCTURES))
    if wrong := next((bits for bits in options.bits if bits not in (8, 4, 3, 2)), None):
        raise UsageError(f"--bits has {wrong}; expected some of 8, 4, 3 and 2")
    usual = SMALL if cpu else LARGE
    models, tokens = options.models or usual[0], options.n or usual[1]
    each = [
        (layer, specs_for(layer, asked, options.blocks, options.cf)) for layer in find_layers(models)
    ]
    return LayerWork(tuple(models), tuple(tokens), tuple(each))


def _layers(model: str, table: dict[str, Any]) -> Iterator[LayerShape]:
    for name, fields in table["layers"].items():
        published = {key: fields[key] for key in STRUCTURES if key in fields}
        yield LayerShape(model, name, fields["in"], fields["out"], table["cf"], published)


def _blocks(layer: LayerShape, structure: str, asked: Sequence[int]) -> list[int]:
    published = [layer.published[structure][1]] if structure in layer.published else []
    usual = [*published, *SWEEP] if structure == "blast" else published or [MONARCH_BLOCKS]
    wanted = dict.fromkeys(asked or sorted(usual))
    return [b for b in wanted if layer.in_features % b == layer.out_features % b == 0]


def _spec(layer: LayerShape, structure: str, blocks: int, cf: float) -> Spec:
    i, o, entry = layer.in_features, layer.out_features, STRUCTURES[structure]
    if entry.of_rank is None:
        return KroneckerSpec(i, o, choose_patterns(i, o, cf)[0])
    step, form = blocks if entry.stepped else 1, LayerSizes(i, o, blocks)
    cost = entry.of_rank(form, step).parameters // step
    published = layer.published_rank(structure, blocks) if cf == layer.cf else None
    item = Item(i * o, cost, step)
    return entry.of_rank(form, published or _rank(layer, cf, item))


def _rank(layer: LayerShape, cf: float, item: Item) -> int:
    """The largest rank within the budget that is a multiple of 16 and its step, below 16 of its step; of
    16 or 8 steps where those leave at most `LEFT` of it, as plans of models do."""
    exact, step = item.rank_of(item.size / cf), item.step
    if exact < step:
        most = item.size / item.least
        raise UsageError(
            f"cf {cf:g} leaves no rank for {layer.title}: the smallest rank has cf {most:.4g}; "
            "give a smaller --cf or fewer --blocks"
        )
    units = (unit for unit in (16 * step, 8 * step) if exact % unit <= LEFT * exact)
    unit = next(units, lcm(step, RANK_STEP) if exact >= lcm(step, RANK_STEP) else step)
    return int(exact // unit) * unit
