"""Finds recipes, shipped ones by name and files by path, and merges them with what they extend, options
that replace their settings, and an effort. Options that nothing would read are refused."""

import os
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import NoReturn

from blr.compressor.base.errors import RecipeError, UsageError
from blr.compressor.checkpoint.regular import read_text
from blr.compressor.recipe.fields import NONE
from blr.compressor.recipe.schema import DENSE, LayerSettings, Recipe, RecipeFields, Rule, make_recipe
from blr.compressor.recipe.yaml_file import MAX_BYTES, RecipeFile, checked, read_recipe
from blr.compressor.structures.registry import STRUCTURES, Structure
from blr.compressor.structures.specs import BlastSpec
from blr.kernels.decode.quantized.formats import K_QUANTS

MAX_CHAIN = 8  # recipes that extend each other
SIZES = {"cf", "model_cf", "rank", "bpw"}  # one of them replaces the others
RULE_KEYS = Rule.model_fields.keys() - {"match", *SIZES}
CACHES = {"kv_rank", "kv_cf"}
BOUND_KEYS = ("pattern", "solver", "rounds")  # have no meaning under another method
EFFORTS: Mapping[str, Mapping[str, int]] = {
    "quick": {"refit": 0, "finish": 0},  # no training
    "normal": {},  # the defaults of the device
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


def load_recipe(
    recipe: Recipe | str | Path | None, overrides: Mapping[str, object] | None = None
) -> Recipe:
    """The recipe of a name or path, with everything it extends and with `overrides`, which also replace
    the settings of rules, except in rules that keep layers dense. With another method pattern, solver
    and rounds are dropped. Raises RecipeError, or UsageError if an override does not fit."""
    overrides = dict(overrides or {})
    if {"rank", "cf"} <= overrides.keys():
        given = f"--rank {overrides['rank']} and --cf {overrides['cf']:g}"
        raise UsageError(f"{given}: a rank says what --cf would follow from; leave one of them out")
    if recipe is None:
        if CACHES & overrides.keys() and not {"method", *SIZES} & overrides.keys():
            overrides["method"] = DENSE  # nothing else was asked for
        return make_recipe(**overrides)
    if isinstance(recipe, Recipe):
        resolved, data = recipe, recipe.model_dump(exclude_unset=True)
    else:
        path = find_recipe(str(recipe))
        file = read_recipe(path)
        data = _resolved(path, file, [])
        resolved = checked(file, Recipe, data)  # settings that do not fit together remain
    if not overrides:
        return resolved
    rules = [_overridden(rule, resolved.method, overrides) for rule in data.get("rules", [])]
    gone = {*BOUND_KEYS} if overrides.get("method", resolved.method) != resolved.method else set()
    gone |= SIZES if SIZES & overrides.keys() else set()
    corrected = overrides.get("base", NONE) != NONE
    gone |= {"cf", "model_cf"} if corrected or overrides.get("method") == DENSE else set()
    kept = {key: value for key, value in data.items() if key not in gone}
    return make_recipe(**{**kept, "rules": rules, **overrides})


def find_recipe(recipe: str) -> Path:
    """The file of a shipped recipe's name or of a path. Raises RecipeError with the nearest names."""
    path = Path(os.path.expanduser(recipe))
    if path.suffix in (".yaml", ".yml") or os.path.isfile(path) or len(path.parts) > 1:
        return path
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    close = get_close_matches(recipe, shipped, 3, 0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "see `blr recipes list`"
    expected = "expected that of one or the path of a .yaml file"
    raise RecipeError(f"{recipe}: found no shipped recipe of this name, {expected}; {hint}")


def shipped_recipes() -> dict[str, Path]:
    """The name and file of every recipe in `recipes/`, sorted."""
    folder = Path(str(files("blr.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe_recipe(path: Path) -> str:
    """The comment in the first line of a recipe file; empty if there is none."""
    first = read_text(path, MAX_BYTES).partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def merge(parent: Mapping[str, object], child: Mapping[str, object]) -> dict[str, object]:
    """`child` over `parent`: mappings are merged, rules of the child come first, one size replaces
    another, and anything else is replaced."""
    replaced = SIZES if SIZES & child.keys() else set()
    merged = {key: value for key, value in parent.items() if key not in replaced}
    for key, value in child.items():
        before, merged[key] = merged.get(key), value
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = merge(before, value)
        elif key == "rules" and isinstance(value, list) and isinstance(before, list):
            merged[key] = [*value, *before]
    return merged


def _resolved(path: Path, file: RecipeFile, seen: list[Path]) -> dict[str, object]:
    """The data of a recipe with everything that it extends. The keys of each file are checked."""
    where = path.resolve()
    if where in seen or len(seen) >= MAX_CHAIN:
        found = "a recipe that extends itself" if where in seen else f"over {MAX_CHAIN} recipes"
        chain = " -> ".join(p.name for p in (*seen, where))
        raise RecipeError(f"{path}: found {found} ({chain}), expected a chain that ends; cut it")
    checked(file, RecipeFields, file.data)
    data = dict(file.data)
    parent = data.pop("extends", None)
    if not isinstance(parent, str):
        return data
    above = _parent(path, file, parent)
    return merge(_resolved(above, read_recipe(above), [*seen, where]), data)


def _parent(path: Path, file: RecipeFile, parent: str) -> Path:
    line = file.line(("extends",))
    if parent in (shipped := shipped_recipes()):
        return shipped[parent]
    target = Path(parent)
    if target.is_absolute() or target.suffix not in (".yaml", ".yml"):
        close = get_close_matches(parent, shipped, 1)
        hint = f"did you mean {close[0]!r}?" if close else "see `blr recipes list`"
        expected = "expected the name of a shipped recipe or a relative path of a .yaml file"
        raise RecipeError(f"{path}:{line}: key 'extends': found {parent!r}, {expected}; {hint}")
    return path.parent / target


def _overridden(
    rule: Mapping[str, object], default: str, overrides: Mapping[str, object]
) -> dict[str, object]:
    """A rule without the settings that `overrides` decide; `default` is the recipe's own method."""
    if rule.get("method") == DENSE:
        return dict(rule)
    gone = {key for key in RULE_KEYS if key in overrides}
    gone |= SIZES if SIZES & overrides.keys() else set()
    if "method" in overrides and rule.get("method", default) != overrides["method"]:
        gone |= set(BOUND_KEYS)
    return {key: value for key, value in rule.items() if key not in gone}


def asked_recipe(
    recipe: Recipe | str | Path | None,
    settings: Mapping[str, object],
    calibrated: bool,
    effort: str | None = None,
    own_text: bool = False,
    apart: Collection[str] = (),
) -> Recipe:
    """`recipe` with `settings` that are given in place of its own, and those of `effort` where neither
    says more. `calibrated`: there is a text; `own_text`: the model writes it; `apart` always have a use.
    Raises UsageError for settings that nothing would use, RecipeError as `load_recipe` does."""
    asked = {n: v for n, v in settings.items() if v is not None and v != [] and v != ()}
    found = load_recipe(recipe, asked)
    refuse_idle(found, {n: v for n, v in asked.items() if n not in apart}, calibrated)
    if own_text and "mix" in asked:
        mix = f"--mix {asked['mix']:g} is beside a text of yours, not --text self"
        raise UsageError(f"{mix}; leave one of them out")
    if effort is None:
        return found
    if not calibrated:
        refuse("effort", effort, "--text")
    return load_recipe(recipe, {**effort_settings(effort, found), **asked})


def effort_settings(effort: str, recipe: Recipe) -> dict[str, int]:
    """The settings of `effort` for a `recipe` that is complete otherwise. Raises UsageError."""
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
