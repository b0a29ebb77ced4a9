"""Makes the recipe of a run from a recipe, options that replace its settings, and an effort.

Options that nothing would read are refused, for silence would mislead. A recipe file may have such
settings, for recipes that extend it.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.schema import DENSE, NONE, LayerSettings, Recipe
from blr.compressor.recipe.shipped_recipes import load_recipe
from blr.compressor.structures.registry import STRUCTURES, Structure
from blr.compressor.structures.specs import BlastSpec
from blr.kernels.decode.quantized.formats import K_QUANTS

NORMAL = "normal"
EFFORTS: Mapping[str, Mapping[str, int]] = {
    "quick": {"refit": 0, "finish": 0},  # no training
    NORMAL: {},  # the defaults of the device
    "best": {"samples": 1600, "refit": 3, "rounds": 100},  # those of the README's best figures
}
PACKED = {"best": {"refit": 4}}  # replaces the above for weights in few bits
ROUNDED = "blast"  # the method that `rounds` above is for
Use = Callable[[Structure], object]
CALIBRATION = ("samples", "seq_len", "mix", "refit", "finish")
FITTED: dict[str, tuple[Use, str]] = {  # settings of some structures: who uses them, also in words
    "blocks": (lambda structure: structure.blocks, "methods monarch and blast"),
    "heads": (lambda structure: structure.grouped, "method svd, or a cache of ranks"),
    "rounds": (lambda structure: structure.iterated, "methods monarch, blast and ks"),
}


def asked_recipe(
    recipe: Recipe | str | Path | None,
    settings: Mapping[str, object],
    calibrated: bool,
    effort: str | None = None,
    own_text: bool = False,
    apart: Collection[str] = (),
) -> Recipe:
    """`recipe` with the `settings` that are given (not None, not empty) in place of its own, and with
    those of `effort` where neither says anything else. `calibrated`: there is a text to fit to;
    `own_text`: the model writes it; `apart` are settings that always have a use. Raises UsageError for
    settings that nothing would use, RecipeError as `load_recipe` does."""
    asked = {n: v for n, v in settings.items() if v is not None and v != [] and v != ()}
    found = load_recipe(recipe, asked)
    refuse_idle(found, {n: v for n, v in asked.items() if n not in apart}, calibrated)
    if own_text and "mix" in asked:
        raise UsageError(
            f"--mix {asked['mix']:g} is beside a text of yours, not --text self; leave one of them out"
        )
    if effort is None:
        return found
    if not calibrated:
        refuse("effort", effort, "--text")
    return load_recipe(recipe, {**effort_settings(effort, found), **asked})


def effort_settings(effort: str, recipe: Recipe) -> dict[str, int]:
    """The settings of `effort` for a `recipe` that is complete otherwise. Raises UsageError if it is
    unknown."""
    if effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: expected one of {', '.join(EFFORTS)}")
    own, found = recipe.own(), dict(EFFORTS[effort])
    if own.stored.bits or own.stored.base:
        found |= PACKED.get(effort, {})
    if own.method != ROUNDED:
        found.pop("rounds", None)
    return found


def refuse_idle(recipe: Recipe, given: Mapping[str, object], calibrated: bool) -> None:
    """Raise UsageError for the first of the `given` settings that `recipe` has no use for."""
    for name, whose in idle(recipe, given, calibrated).items():
        refuse(name, given[name], whose)


def idle(recipe: Recipe, given: Collection[str], calibrated: bool) -> dict[str, str]:
    """The `given` settings that no layer of `recipe` has a use for, with what they belong to."""
    found = {} if calibrated else dict.fromkeys(CALIBRATION, "--text")
    layers = recipe.layers()
    for name, (uses, whose) in FITTED.items():
        if not any(_fits(layer, uses) for layer in layers):
            found[name] = whose
    if recipe.allocation != "uniform" and not calibrated:
        found["allocation"] = "--text"
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
    """Raise UsageError for a setting without a use; `whose` is what it belongs to."""
    option = f"--{name.replace('_', '-')}"
    raise UsageError(f"{option} {value}: nothing would use it, it belongs to {whose}; leave it out")


def _fits(layer: LayerSettings, uses: Use) -> bool:
    structure = STRUCTURES.get(layer.method)
    return bool(structure and uses(structure))


def _shares(layer: LayerSettings) -> bool:
    """Whether the layer's size is a share of a budget."""
    sized = layer.rank or layer.pattern or layer.stored.base
    return layer.method != DENSE and not sized


def _of_storing(recipe: Recipe, layers: list[LayerSettings]) -> dict[str, str]:
    """Settings of how layers are stored that have no use; a target speed decides these by itself."""
    found = {}
    packed = [layer for layer in layers if layer.stored.bits or layer.stored.base]
    if not packed:
        found["group"] = "--quantize and --base"
    bits = K_QUANTS.get(recipe.grid or "", 3)
    if not any(bits in (layer.stored.bits, layer.stored.base) for layer in packed):
        found["grid"] = f"int{bits}"
    if not any(_fits(layer, lambda structure: structure.spec is BlastSpec) for layer in packed):
        found["couplings"] = "method blast with --quantize or --base"
    if recipe.base not in (None, NONE) and all(layer.stored.base is None for layer in layers):
        found["base"] = f"a --method that corrects it, not {DENSE}"
    if not recipe.former_methods:  # `auto` took it
        found["gpu"] = "--tokens-per-second and --for-draft"
    return found
