"""A sweep from a model and a grid to a table: missing points are made, what fails is said and left."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

from blr.compressor import __version__
from blr.compressor.base.disk import scratch_folder
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import READING, Progress
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import digest_of
from blr.compressor.checkpoint.source import Source
from blr.compressor.commands.sweep.chain import PointChain, command_line, run_chains, slots
from blr.compressor.commands.sweep.folder import PAGE, Folder, point_digest
from blr.compressor.commands.sweep.page import (
    FailedPoint,
    MadePoint,
    SweepResult,
    frontier,
    over_seeds,
    page,
    share_of_plain,
)
from blr.compressor.loading.checked import open_checked
from blr.compressor.output.loss_messages import MOST
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.planning.sizing import tokens_per_second
from blr.compressor.recipe.chosen import idle, refuse
from blr.compressor.recipe.schema import DENSE, Recipe, make_recipe
from blr.compressor.text.reading import calibration_digest
from blr.compressor.workspace.journal import headers_digest
from blr.compressor.workspace.ownership import check_apart, check_outside

T = TypeVar("T")
NONE = "none"
SWEEPING = "sweeping"  # the step behind the reading
MODEL = "dense"  # the record of the model itself
MAX_TEXT = 2 * 2**30  # bytes


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
    """One compression by its own `settings` and those of all points that it uses (`shared`), with `heal`
    minutes of training, on the curve `kind`."""

    name: str
    kind: str
    settings: dict[str, object]
    heal: float = 0.0
    seed: int | None = None
    shared: dict[str, object] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return make_recipe(**self.shared | self.settings)

    @property
    def setting(self) -> str:
        return self.name if self.seed is None else self.name.removesuffix(f"-seed{self.seed}")

    @property
    def plain(self) -> bool:
        return self.settings["method"] == DENSE

    @property
    def options(self) -> list[str]:
        """Of `blr compress`."""
        found: list[str] = []
        for name, value in (self.shared | self.settings).items():
            for one in value if isinstance(value, list | tuple) else [value]:
                shown = _shown(one) if isinstance(one, float) else str(one)
                found += [f"--{name.replace('_', '-')}", shown]
        return found + ([f"--heal={_shown(self.heal)}"] if self.heal else [])


def _shown(number: float) -> str:
    """The shortest text of a number that reads back the same."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def points_of(grid: Grid, common: dict[str, object], calibrated: bool) -> list[Point]:
    """Every point, plain quantization first; `common` settings go to all that use them. Raises
    UsageError for settings that do not fit or are unused, and for a point twice or none."""
    _refuse_lists(grid)
    plain = (Point(k, "plain", {"method": DENSE, "quantize": k}) for k in grid.plain)
    bare = [*plain, *_structured(grid), *_corrected(grid)]
    found = [_varied(*one) for one in product(bare, grid.heals, grid.seeds or (None,))]
    names = [point.name for point in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the sweep holds {twice} twice; give every method, factor and rank once")
    if not found:
        raise UsageError("the sweep holds no point; give --methods with --cf, or --base with --rank")
    unused = [idle(make_recipe(**common | p.settings), common, calibrated) for p in found]
    for name in common:
        if all(name in one for one in unused):
            # --text of a sweep is what losses are measured on
            refuse(name, common[name], unused[0][name].replace("--text", "--calibration"))
    shared = [{name: common[name] for name in common if name not in one} for one in unused]
    return [replace(point, shared=used) for point, used in zip(found, shared, strict=True)]


def _refuse_lists(grid: Grid) -> None:
    """Raise UsageError for lists that are of other options, or that nothing is combined with."""
    if DENSE in grid.methods:
        raise UsageError(
            "--methods are structures; dense weights in few bits are the line of --plain: give that"
        )
    if bool(grid.bases) != bool(grid.ranks):
        raise UsageError("--base and --rank make points together; give both, or leave out the other")
    if grid.methods and not grid.cfs and not grid.bases:
        raise UsageError("--methods make points with --cf, or --base and --rank; give one of these")
    if grid.quantize != (NONE,) and not grid.cfs:
        raise UsageError(
            "--quantize is of the factors of --cf; give that, or --plain for dense weights in few bits"
        )


def _structured(grid: Grid) -> Iterator[Point]:
    for method, cf, kind in product(grid.methods, grid.cfs, grid.quantize):
        stored = {} if kind == NONE else {"quantize": kind}
        suffix = "" if kind == NONE else f"-{kind}"
        settings = {"method": method, "cf": cf, **stored}
        yield Point(f"{method}-cf{cf:g}{suffix}", f"{method}{suffix}", settings)


def _corrected(grid: Grid) -> Iterator[Point]:
    for base, method, rank in product(grid.bases, grid.methods, grid.ranks):
        settings: dict[str, object] = {"base": base, "method": method, "rank": rank}
        yield Point(f"{base}-{method}-r{rank}", f"{base} + {method}", settings)


def _varied(point: Point, minutes: float, seed: int | None) -> Point:
    name, kind, settings = point.name, point.kind, point.settings
    if minutes:
        name, kind = f"{name}-heal{minutes:g}", f"{kind}, healed"
    if seed is not None:
        name, settings = f"{name}-seed{seed}", {**settings, "seed": seed}
    return Point(name, kind, settings, minutes, seed)


def listed(option: str, text: str, kind: Callable[[str], T], *, least: int = 0) -> tuple[T, ...]:
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


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep of `model` runs: judged by `texts`, with `common` settings of all recipes, `evaluate`
    options of `blr eval`, `jobs` at once on each GPU, speeds predicted for `gpu`."""

    model: str
    texts: tuple[Path, ...]
    common: dict[str, object] = field(default_factory=dict)
    calibration: str | None = None
    evaluate: tuple[str, ...] = ()
    device: str = "auto"
    jobs: int = 1
    keep: bool = False
    restart: bool = False
    gpu: str | None = None
    offline: bool = False


def sweep(
    folder: Path, points: list[Point], output: Path, settings: SweepSettings, progress: Progress
) -> SweepResult:
    """Make the `points` that `output` lacks; the losses of all. Raises UsageError,
    InputError or OutputError before anything is made, and the error of the dense model."""
    check_apart(output, folder)
    check_outside(output)
    progress.loading()
    progress.expect(READING, SWEEPING)
    source, gpu = open_checked(folder), chosen_gpu(settings.gpu)[0]
    made = {p.name: point_digest(p.recipe.model_dump(mode="json"), p.heal) for p in points}
    place = Folder(output, _common(source, settings, progress), {MODEL: "", **made})
    with place.held(settings.restart):
        with scratch_folder() as states:
            chains = _chains(place, points, settings, states)
            _run(chains, settings, progress)
        calibrated = settings.calibration is not None
        speeds = [(p, tokens_per_second(source, p.recipe, gpu, calibrated)) for p in points]
        result = _result(place, chains, speeds, settings)
        place.finish(asdict(result))
        place.write(PAGE, page(result))
    return result


def _common(source: Source, settings: SweepSettings, progress: Progress) -> dict[str, object]:
    """What all points share and another run must share: models and texts by their contents."""
    from blr.compressor.base.device import pick_device
    from blr.compressor.loading.load import load_tokenizer
    from blr.compressor.text.reading import beginning_of
    from blr.compressor.workspace.scan import scan_source

    calibration, remedy = settings.calibration, "repair the checkpoint, or take another"
    texts = [digest_of(path, MAX_TEXT) for path in settings.texts]
    for path, digest in zip(settings.texts, texts, strict=True):
        if (first := settings.texts[texts.index(digest)]) is not path:
            raise UsageError(f"--text {path}: the same text as {first}; give every text once")
    device = pick_device(settings.device)
    beginning = beginning_of(load_tokenizer(source.folder))
    return {
        "headers": headers_digest(source),
        "weights": scan_source(source, remedy, progress).digest,
        "settings": settings.common,
        "calibration": None if calibration is None else calibration_digest(calibration),
        "texts": {str(number): digest for number, digest in enumerate(texts, 1)},
        **({"beginning": list(beginning)} if beginning else {}),  # losses without it are others
        "evaluate": list(settings.evaluate),
        "device": device.type,
        "version": __version__,
    }


def _chains(
    place: Folder, points: Sequence[Point], settings: SweepSettings, states: Path
) -> dict[str, PointChain]:
    """The commands of every point by name, the dense model first. The folder `states` keeps what points
    are compared with."""
    judged = tuple(part for path in settings.texts for part in ("--text", str(path)))
    here = ("--device", settings.device, *["--offline"] * settings.offline)
    evaluate = (*judged, *settings.evaluate, *here)
    found = {MODEL: PointChain(place, MODEL, settings.model, None, evaluate)}
    evaluate = (*evaluate, "--against", settings.model, "--keep-dense", str(states))
    for point in points:
        options = (*_options(point, settings), *here)
        found[point.name] = PointChain(
            place, point.name, settings.model, options, evaluate, settings.keep
        )
    return found


def _options(point: Point, settings: SweepSettings) -> tuple[str, ...]:
    text = [] if settings.calibration is None else ["--calibration", settings.calibration]
    return (*point.options, *text)


def _run(chains: dict[str, PointChain], settings: SweepSettings, progress: Progress) -> None:
    missing = [chain for chain in chains.values() if chain.missing()]
    for chain in chains.values():
        if chain not in missing:
            chain.tidy()  # a run was killed before it did
    if done := len(chains) - len(missing):
        progress.say(f"{done} of {len(chains)} points are there already")
    with progress.layers(len(missing), SWEEPING) as advance:
        for chain in missing:
            chain.begun = advance
        if missing:
            run_chains(missing, slots(settings.device, settings.jobs))
    lost = [chain for chain in missing if chain.failure]
    progress.notes([f"{chain.name} failed: {chain.failure}" for chain in lost])


def _result(
    place: Folder,
    chains: dict[str, PointChain],
    speeds: Sequence[tuple[Point, float | None]],
    settings: SweepSettings,
) -> SweepResult:
    dense = place.record(MODEL)
    assert dense is not None  # else the sweep has ended
    base = dense.perplexities
    made, failed = dict[str, list[MadePoint]](), list[FailedPoint]()
    for point, speed in speeds:
        record = place.record(point.name)
        options = _options(point, settings)
        line = command_line(settings.model, options, point.name)
        if record is None:
            lost = chains[point.name]
            failed.append(FailedPoint(point.name, lost.failure, lost.code, line))
            continue
        assert record.bits is not None and record.bytes is not None  # the dense model's alone has none
        losses = [math.log(p / d) for p, d in zip(record.perplexities, base, strict=True)]
        if max(losses) > MOST:  # what `blr compress` alone would refuse
            line = command_line(settings.model, (*options, "--force"), point.name)
        facts = (point.name, point.kind, point.plain, point.heal, record.bits, tuple(losses))
        sizes = record.bytes, record.seconds
        one = MadePoint(*facts, speed, (line,), *sizes, kl=tuple(record.kl))
        made.setdefault(point.setting, []).append(one)
    found = [over_seeds(alike, setting) for setting, alike in made.items()]
    texts = range(len(settings.texts))
    rows = [replace(p, of_plain=tuple(share_of_plain(found, p, text) for text in texts)) for p in found]
    best, gpu = [one.name for one in frontier(found)], chosen_gpu(settings.gpu)[0].name
    return SweepResult(settings.model, list(map(str, settings.texts)), base, gpu, rows, failed, best)
