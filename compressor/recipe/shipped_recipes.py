"""Finds and lists recipes: shipped ones by name, files by path. It also merges what they extend."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from blr.compressor.base.errors import RecipeError, UsageError
from blr.compressor.checkpoint.regular import read_text
from blr.compressor.recipe.schema import DENSE, NONE, Recipe, RecipeFields, make_recipe
from blr.compressor.recipe.yaml_file import MAX_BYTES, RecipeFile, explain, read_recipe

MAX_CHAIN = 8  # recipes that extend each other
RULE_KEYS = (
    *("method", "blocks", "pattern", "heads", "solver", "rounds"),
    *("quantize", "group", "grid", "couplings", "base"),
)
SIZES = {"cf", "model_cf", "rank", "bpw"}  # one of them replaces the others
CACHES = {"kv_rank", "kv_cf"}
BOUND_KEYS = ("pattern", "solver", "rounds")  # have no meaning under another method


def load_recipe(
    recipe: Recipe | str | Path | None, overrides: Mapping[str, object] | None = None
) -> Recipe:
    """The recipe of a name or path, with everything it extends and with `overrides`. These also replace
    the same settings of rules, except in rules that keep layers dense. If they change the method,
    pattern, solver and rounds are dropped; if they only ask for a cache of ranks, nothing else
    changes. Raises RecipeError if the recipe cannot be read, UsageError if an override does not fit."""
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
        resolved = _checked(file, data)
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
    raise RecipeError(
        f"{recipe}: found no shipped recipe of this name, expected that of one or the "
        f"path of a .yaml file; {hint}"
    )


def shipped_recipes() -> dict[str, Path]:
    """The name and file of every recipe in `recipes/`, sorted."""
    folder = Path(str(files("blr.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe_recipe(path: Path) -> str:
    """The comment in the first line of a recipe file; empty if there is none."""
    first = read_text(path, MAX_BYTES).partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def merge(parent: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """`child` over `parent`: mappings are merged, rules of the child come first, one size replaces
    another, and anything else is replaced."""
    replaced = SIZES if SIZES & child.keys() else set()
    merged = {key: value for key, value in parent.items() if key not in replaced}
    for key, value in child.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = [*value, *merged.get(key, [])] if key == "rules" else value
    return merged


def _resolved(path: Path, file: RecipeFile, seen: list[Path]) -> dict[str, object]:
    """The data of a recipe with everything that it extends. The keys of each file are checked."""
    where = path.resolve()
    if where in seen or len(seen) >= MAX_CHAIN:
        found = "a recipe that extends itself" if where in seen else f"over {MAX_CHAIN} recipes"
        chain = " -> ".join(p.name for p in (*seen, where))
        raise RecipeError(f"{path}: found {found} ({chain}), expected a chain that ends; cut it")
    try:
        RecipeFields.model_validate(file.data)
    except ValidationError as error:
        raise RecipeError(explain(file, error, RecipeFields)) from None
    data = dict(file.data)
    parent = data.pop("extends", None)
    if parent is None:
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
        raise RecipeError(
            f"{path}:{line}: key 'extends': found {parent!r}, expected the name of a shipped recipe "
            f"or a relative path of a .yaml file; {hint}"
        )
    return path.parent / target


def _checked(file: RecipeFile, data: dict[str, object]) -> Recipe:
    """`data` as a recipe. The errors that remain here are settings that do not fit together."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(file, error, Recipe)) from None


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
