"""Chooses the ranks that a cache of keys and values holds: groups of heads, and shares of one budget.
Numbers are paid for per token, so a rank goes where it saves most: singular values of all layers are
taken from the largest on (reverse water filling), by the Fisher information behind the attention."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from blr.compressor.planning.assign import Curves, nearest_grouping
from blr.compressor.planning.layers import Layer
from blr.compressor.recipe.schema import LayerSettings, Recipe

KINDS = ("k_proj", "v_proj", "c_attn")  # types of layers that make keys and values of decoders
SHARED = KINDS[:2]  # those whose outputs are all cached
JOINT = 256  # least features of a group of heads, if there are so many
UNIT = 4  # ranks that are given at a time
FLOOR = 1 / 16  # least rank of a group, relative to its width


def cached_settings(layers: Sequence[Layer], recipe: Recipe, curves: Curves) -> dict[str, LayerSettings]:
    """The settings of layers whose ranks are cached: by measured `curves`, or the same share for all."""
    if not recipe.caches_ranks:
        return {}
    cached = [layer for layer in layers if layer.type in KINDS]
    groups = {layer.module: _groups(layer, recipe.heads) for layer in cached}
    ranks = {}
    if recipe.kv_cf and recipe.allocation != "uniform":
        shared = [layer for layer in cached if layer.type in SHARED and layer.module in curves]
        ranks = _filled(shared, groups, curves, recipe.kv_cf)
    rule, found = "kv_rank" if recipe.kv_rank else f"kv_cf {recipe.kv_cf:g}", {}
    for layer in cached:
        number, stored = groups[layer.module], recipe.settings_for(layer.module).stored
        even = max(int(layer.shape[0] / number / (recipe.kv_cf or 1)), 1)
        rank = recipe.kv_rank or ranks.get(layer.module, even)
        packed = replace(stored, base=None, bpw=None)
        heads = f"grouped:{number}"
        found[layer.module] = LayerSettings("svd", rank=rank, heads=heads, rule=rule, stored=packed)
    return found


def _groups(layer: Layer, heads: str) -> int:
    """The number of groups of heads: what the recipe says, else so few that each has `JOINT` features.
    Queries, keys and values in one projection are in different groups."""
    width = layer.shape[0]
    if heads.startswith("grouped"):
        asked = int(heads.removeprefix("grouped:"))
    elif heads == "per-head" or layer.type not in SHARED:
        asked = layer.heads
    else:
        asked = max(width // JOINT, 1)
    if layer.type in SHARED or layer.heads % 3:
        return nearest_grouping(asked, layer.heads, width)
    return 3 * nearest_grouping(max(asked // 3, 1), layer.heads // 3, width // 3)


def _filled(
    layers: list[Layer], groups: Mapping[str, int], curves: Curves, factor: float
) -> dict[str, int]:
    """The rank of each group of every layer, from one budget."""
    widths = {layer.module: layer.shape[0] // groups[layer.module] for layer in layers}
    ranks = {name: max(int(FLOOR * width), 1) for name, width in widths.items()}
    left = sum(layer.shape[0] for layer in layers) / factor
    left -= sum(rank * groups[name] for name, rank in ranks.items())
    steps = [
        step
        for name, width in widths.items()
        for step in _steps(name, ranks[name], width, groups[name], curves[name])
    ]
    for _, name, rank, price in sorted(steps, key=lambda step: -step[0]):
        if price <= left:
            ranks[name], left = rank, left - price
    return ranks


def _steps(
    name: str, rank: int, width: int, groups: int, curve: Sequence[float]
) -> Iterator[tuple[float, str, int, int]]:
    """Of further ranks: what each saves a number cached, the layer's name, the rank then, its price."""
    while rank < width:
        after = min(rank + UNIT, width)
        price = groups * (after - rank)
        yield sum(curve[groups * rank : groups * after]) / price, name, after, price
        rank = after
