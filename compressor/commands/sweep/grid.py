"""The points of a sweep: which compressions of a model are made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import quote
from blr.compressor.recipe.chosen import idle, refuse
from blr.compressor.recipe.schema import DENSE, Recipe, make_recipe

NONE = "none"


@dataclass(frozen=True)
class Grid:
    """The lists that are combined: `methods` × `cfs` × `quantize` of their factors; `bases` × `methods`
    × `ranks` of corrections; `plain` quantization; each × `heals` (minutes) × `seeds`."""

    methods: tuple[str, ...]
    cfs: tuple[float, ...]
    quantize: tuple[str, ...] = (NONE,)
    bases: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    plain: tuple[str, ...] = ()
    heals: tuple[float, ...] = (0.0,)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Point:
    """One compression by its own `settings`, with `heal` minutes of training, on the curve `kind`."""

    name: str
    kind: str
    settings: tuple[tuple[str, object], ...]
    heal: float = 0.0
    seed: int | None = None

    @property
    def setting(self) -> str:
        return self.name if self.seed is None else self.name.removesuffix(f"-seed{self.seed}")

    @property
    def plain(self) -> bool:
        return ("method", DENSE) in self.settings

    @property
    def options(self) -> list[str]:
        found: list[str] = []
        for name, value in self.settings:
            found += [f"--{name}", _shown(value) if isinstance(value, float) else str(value)]
        return found + ([f"--heal={_shown(self.heal)}"] if self.heal else [])


def _shown(number: float) -> str:
    """The shortest text of a number that reads back the same."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def points_of(grid: Grid, common: dict[str, object], calibrated: bool) -> dict[Point, Recipe]:
    """Every point with its recipe, plain quantization first; `common` settings go to all that use them.
    Raises UsageError for settings that do not fit or are unused, and for a point twice or none."""
    if DENSE in grid.methods:
        raise UsageError(
            "--methods are structures; dense weights in few bits are the line of --plain: give that"
        )
    _refuse_halves(grid)
    plain = (Point(k, "plain", (("method", DENSE), ("quantize", k))) for k in grid.plain)
    bare = [*plain, *_structured(grid), *_corrected(grid)]
    found = [_varied(*one) for one in product(bare, grid.heals, grid.seeds or (None,))]
    names = [point.name for point in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the sweep holds {twice} twice; give every method, factor and rank once")
    if not found:
        raise UsageError("the sweep holds no point; give --methods with --cf, or --base with --rank")
    _refuse_unused(found, common, calibrated)
    return {point: make_recipe(**_fitting(point, common)) for point in found}


def _refuse_halves(grid: Grid) -> None:
    """Raise UsageError for lists that nothing is combined with."""
    if bool(grid.bases) != bool(grid.ranks):
        raise UsageError("--base and --rank make points together; give both, or leave out the other")
    if grid.methods and not grid.cfs and not grid.bases:
        raise UsageError("--methods make points with --cf, or --base and --rank; give one of these")
    if grid.quantize != (NONE,) and not grid.cfs:
        raise UsageError(
            "--quantize is of the factors of --cf; give that, or --plain for dense weights in few bits"
        )


def _refuse_unused(points: Sequence[Point], common: dict[str, object], calibrated: bool) -> None:
    """Raise UsageError for a setting that no point uses."""
    recipes = [make_recipe(**common | dict(point.settings)) for point in points]
    unused = [idle(recipe, common, calibrated) for recipe in recipes]
    for name in common:
        if all(name in found for found in unused):
            # --text of a sweep is what losses are measured on
            refuse(name, common[name], unused[0][name].replace("--text", "--calibration"))


def _fitting(point: Point, common: dict[str, object]) -> dict[str, object]:
    """The settings of a point, with the common ones that it uses."""
    own = dict(point.settings)
    unused = idle(make_recipe(**common | own), common, calibrated=True)
    return {name: value for name, value in common.items() if name not in unused} | own


def _structured(grid: Grid) -> Iterator[Point]:
    for method, cf, kind in product(grid.methods, grid.cfs, grid.quantize):
        stored = () if kind == NONE else (("quantize", kind),)
        suffix = "" if kind == NONE else f"-{kind}"
        settings = (("method", method), ("cf", cf), *stored)
        yield Point(f"{method}-cf{cf:g}{suffix}", f"{method}{suffix}", settings)


def _corrected(grid: Grid) -> Iterator[Point]:
    for base, method, rank in product(grid.bases, grid.methods, grid.ranks):
        settings = (("base", base), ("method", method), ("rank", rank))
        yield Point(f"{base}-{method}-r{rank}", f"{base} + {method}", settings)


def _varied(point: Point, minutes: float, seed: int | None) -> Point:
    """The point with some minutes of healing, and a seed."""
    name, kind, settings = point.name, point.kind, point.settings
    if minutes:
        name, kind = f"{name}-heal{minutes:g}", f"{kind}, healed"
    if seed is not None:
        name, settings = f"{name}-seed{seed}", (*settings, ("seed", seed))
    return Point(name, kind, settings, minutes, seed)


def listed(option: str, text: str, kind: type = str, *, least: int = 0) -> tuple[Any, ...]:
    """``"1.5,2"`` -> (1.5, 2.0). Raises UsageError for no such list, or one of fewer than `least`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) < least:
        raise UsageError(f"{option} is empty: expected a list; check the variable it came from")
    try:
        return tuple(kind(part) for part in parts)
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        found = quote(text, 40)[1:-1]
        raise UsageError(f"{option} {found}: expected {wanted} with commas between") from None


def common_options(common: dict[str, object], point: Point) -> Sequence[str]:
    """`common` settings as options of `blr compress`."""
    found: list[str] = []
    for name, value in _fitting(point, common).items():
        if name in dict(point.settings):
            continue
        values = value if isinstance(value, list | tuple) else [value]
        found += [part for one in values for part in (f"--{name.replace('_', '-')}", str(one))]
    return found
