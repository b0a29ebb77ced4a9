"""Chooses the ranks that a cache of keys and values holds: groups of heads, and shares of one budget.

All keys and values are paid for in numbers per token, so a rank goes where it saves most: singular
values of all layers are taken from the largest on until the budget is spent (reverse water filling).
What they are worth is measured behind the attention (Fisher information of values, and of keys before
their rotation, `fitting/sensitivity`), which averages over the queries and positions that read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blr.compressor.planning.heads import nearest_grouping
from blr.compressor.planning.layers import Layer
from blr.compressor.recipe.schema import LayerSettings, Recipe
from blr.compressor.structures.cached import held_bytes
from blr.compressor.structures.specs import LowRankSpec

if TYPE_CHECKING:
    from blr.compressor.planning.plan import Plan, PlannedLayer

KINDS = ("k_proj", "v_proj", "c_attn")  # types of layers that make keys and values of decoders
SHARED = KINDS[:2]  # those whose outputs are all cached
JOINT = 256  # least features of a group of heads, if there are so many
UNIT = 4  # ranks that are given at a time
FLOOR = 1 / 16  # least rank of a group, relative to its width
Curves = Mapping[str, Sequence[float]]


class Cached:
    """The settings of layers whose ranks are cached: by measured `curves`, or with the same share for
    all."""

    def __init__(self, layers: Sequence[Layer], recipe: Recipe, curves: Curves) -> None:
        self.recipe = recipe
        self.ranks: dict[str, int] = {}
        shared = [layer for layer in layers if layer.type in SHARED and layer.module in curves]
        if recipe.kv_cf and recipe.allocation != "uniform":
            self.ranks = self._filled(shared, curves, recipe.kv_cf)

    def settings(self, layer: Layer, settings: LayerSettings) -> LayerSettings:
        """The settings of a layer whose ranks are cached; `settings` as they are for any other layer."""
        recipe = self.recipe
        if not recipe.caches_ranks or layer.type not in KINDS:
            return settings
        groups = self.groups(layer)
        even = max(int(layer.shape[0] / groups / (recipe.kv_cf or 1)), 1)
        rank = recipe.kv_rank or self.ranks.get(layer.module, even)
        rule = "kv_rank" if recipe.kv_rank else f"kv_cf {recipe.kv_cf:g}"
        packed = replace(settings.stored, base=None, bpw=None)
        return LayerSettings("svd", rank=rank, heads=f"grouped:{groups}", rule=rule, stored=packed)

    def groups(self, layer: Layer) -> int:
        """The number of groups of heads: what the recipe says, else so few that each has `JOINT`
        features, for heads that share ranks lose less. Queries, keys and values in one projection are
        in different groups."""
        heads, width = self.recipe.heads, layer.shape[0]
        if heads.startswith("grouped"):
            asked = int(heads.removeprefix("grouped:"))
        elif heads == "per-head" or layer.type not in SHARED:
            asked = layer.heads
        else:
            asked = max(width // JOINT, 1)
        if layer.type in SHARED or layer.heads % 3:
            return nearest_grouping(asked, layer.heads, width)
        return 3 * nearest_grouping(max(asked // 3, 1), layer.heads // 3, width // 3)

    def _filled(self, layers: list[Layer], curves: Curves, factor: float) -> dict[str, int]:
        """The rank of each group of every layer, from one budget."""
        groups = {layer.module: self.groups(layer) for layer in layers}
        widths = {layer.module: layer.shape[0] // groups[layer.module] for layer in layers}
        ranks = {name: max(int(FLOOR * width), 1) for name, width in widths.items()}
        left = sum(layer.shape[0] for layer in layers) / factor
        left -= sum(ranks[name] * groups[name] for name in ranks)
        steps = [
            step
            for name, width in widths.items()
            for step in _steps(name, ranks[name], width, groups[name], curves[name])
        ]
        for _, name, rank, price in sorted(steps, key=lambda step: -step[0]):
            if price <= left:
                ranks[name], left = rank, left - price
        return ranks


def cache_notes(plan: Plan, curves: Curves, tokens: int) -> list[str]:
    """A note on how much smaller a cache of ranks is, and on the loss that `curves` measured on
    `tokens` predict before refit and rounding: half of the part that is cut off."""
    if plan.kv_cache is None:
        return []
    named = [(p, p.spec.plain) for p in plan.layers if p.layer.type in KINDS]
    ranked = [(layer, spec) for layer, spec in named if isinstance(spec, LowRankSpec)]
    held, whole = map(sum, zip(*(_sizes(*pair, plan.kv_cache) for pair in ranked), strict=True))
    sizes = f"{whole / held:.2f} times smaller, {whole:,.0f} -> {held:,.0f} bytes a token"
    said = f"cache of keys and values: {sizes}"
    if not curves or any(layer.layer.type not in SHARED for layer, _ in ranked):
        return [said]
    left = (curves.get(layer.layer.module, ())[spec.groups * spec.rank :] for layer, spec in ranked)
    nats = sum(map(sum, left)) / 2 / max(tokens, 1) ** 2
    less = "a smaller --kv-cf, or 1 with --kv-quantize int8, loses less"
    return [f"{said}, predicted to lose about {nats:.2g} nats a token; {less}"]


def _sizes(planned: PlannedLayer, spec: LowRankSpec, kind: str) -> tuple[float, float]:
    """The bytes of a token's ranks in one layer, and of its whole keys or values."""
    width = planned.width // 8
    share = 1 if planned.layer.type in SHARED else 2 / 3  # queries are not held
    return share * spec.groups * held_bytes(spec.rank, kind, width), share * width * spec.out_features


def _steps(
    name: str, rank: int, width: int, groups: int, curve: Sequence[float]
) -> Iterator[tuple[float, str, int, int]]:
    """For each further step of ranks: what it saves for each number cached, the layer's name, the rank
    after it, and its price."""
    while rank < width:
        after = min(rank + UNIT, width)
        price = groups * (after - rank)
        yield sum(curve[groups * rank : groups * after]) / price, name, after, price
        rank = after
