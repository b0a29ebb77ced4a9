"""Options that nothing would read: refused on the command line, where silence would mislead.

A recipe file may hold such settings, for what extends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.schema import DENSE, NONE, LayerSettings, Recipe
from blr.compressor.structures.registry import STRUCTURES, Structure
from blr.compressor.structures.specs import BlastSpec

Use = Callable[[Structure], object]
CALIBRATION = ("samples", "seq_len", "mix", "refit", "finish")
FITTED: dict[str, tuple[Use, str]] = {  # what some structures alone have: who uses it, in words
    "blocks": (lambda structure: structure.blocks, "methods monarch and blast"),
    "heads": (lambda structure: structure.grouped, "method svd, or a cache of ranks"),
    "rounds": (lambda structure: structure.iterated, "methods monarch, blast and ks"),
}


def refuse_idle(recipe: Recipe, given: Mapping[str, object], calibrated: bool) -> None:
    """Raise UsageError for the first of the `given` settings that `recipe` has no use for."""
    for name, whose in idle(recipe, given, calibrated).items():
        refuse(name, given[name], whose)


def idle(recipe: Recipe, given: Collection[str], calibrated: bool) -> dict[str, str]:
    """The `given` settings that no layer of `recipe` has a use for, with what they belong to."""
    found = {} if calibrated else dict.fromkeys(CALIBRATION, "--calibration")
    layers = recipe.layers()
    for name, (uses, whose) in FITTED.items():
        if not any(_fits(layer, uses) for layer in layers):
            found[name] = whose
    if recipe.allocation != "uniform" and not calibrated:
        found["allocation"] = "--calibration"
    if recipe.kv_cf is None and not any(map(_shares, layers)):
        found["allocation"] = "layers that --cf or --kv-cf sizes"
    if recipe.caches_ranks:
        found.pop("heads", None)
    if recipe.kv_cf == 1 and recipe.kv_quantize is None:
        found["kv_cf"] = "--kv-quantize, or to a factor above 1"
    if recipe.tokens_per_second is None:
        found |= _of_storing(recipe, layers)
    return {name: whose for name, whose in found.items() if name in given}


def refuse(name: str, value: object, whose: str) -> NoReturn:
    """Raise UsageError for a setting that is of no use, but for that whose it is."""
    option = f"--{name.replace('_', '-')}"
    raise UsageError(f"{option} {value}: nothing would use it, it belongs to {whose}; leave it out")


def _fits(layer: LayerSettings, uses: Use) -> bool:
    structure = STRUCTURES.get(layer.method)
    return bool(structure and uses(structure))


def _shares(layer: LayerSettings) -> bool:
    """Whether its size is a share of a budget."""
    sized = layer.rank or layer.pattern or layer.stored.base
    return layer.method != DENSE and not sized


def _of_storing(recipe: Recipe, layers: list[LayerSettings]) -> dict[str, str]:
    """Those of how layers are stored, which a speed decides where there is one to reach."""
    found = {}
    packed = [layer for layer in layers if layer.stored.bits or layer.stored.base]
    if not packed:
        found["group"] = "--quantize and --base"
    if not any(3 in (layer.stored.bits, layer.stored.base) for layer in packed):
        found["grid"] = "int3"
    if not any(_fits(layer, lambda structure: structure.spec is BlastSpec) for layer in packed):
        found["couplings"] = "method blast with --quantize or --base"
    if recipe.base not in (None, NONE) and all(layer.stored.base is None for layer in layers):
        found["base"] = f"a --method that corrects it, not {DENSE}"
    if not recipe.former_methods:  # `auto` took it
        found["gpu"] = "--tokens-per-second"
    return found
