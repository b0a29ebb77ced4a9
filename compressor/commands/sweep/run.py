"""A sweep from a model and a grid to a table: what is missing is made, what fails is said and left."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blr.compressor import __version__
from blr.compressor.base.disk import scratch_folder
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import READING, Progress
from blr.compressor.checkpoint.regular import digest_of
from blr.compressor.checkpoint.source import Source
from blr.compressor.commands.sweep.chain import PointChain, Pool, command_line, slots
from blr.compressor.commands.sweep.folder import PAGE, Folder, point_digest
from blr.compressor.commands.sweep.grid import Point, common_options
from blr.compressor.commands.sweep.page import MadePoint, frontier, over_seeds, page, share_of_plain
from blr.compressor.loading.checked import open_checked
from blr.compressor.output.loss_messages import MOST
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.planning.sizing import tokens_per_second
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.reading import calibration_digest
from blr.compressor.workspace.journal import headers_digest
from blr.compressor.workspace.ownership import check_apart, check_outside

SWEEPING = "sweeping"  # the step behind the reading
DENSE = "dense"  # the record of the model itself
MAX_TEXT = 2 * 2**30  # bytes


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep of `model` runs: judged by `texts`, with `common` settings of all recipes, `evaluate`
    options of `blr eval`, `jobs` at once on each GPU, speeds predicted for `gpu`."""

    model: str
    texts: tuple[Path, ...]
    common: dict[str, Any] = field(default_factory=dict)
    calibration: str | None = None
    evaluate: tuple[str, ...] = ()
    device: str = "auto"
    jobs: int = 1
    keep: bool = False
    restart: bool = False
    gpu: str | None = None
    offline: bool = False


def sweep(
    folder: Path, recipes: dict[Point, Recipe], output: Path, settings: SweepSettings, progress: Progress
) -> dict[str, Any]:
    """Make the points of `recipes` that `output` lacks; all losses, JSON-ready. Raises UsageError,
    InputError or OutputError before anything is made, and the error of the dense model."""
    check_apart(output, folder)
    check_outside(output)
    progress.loading()
    progress.expect(READING, SWEEPING)
    source, gpu = open_checked(folder), chosen_gpu(settings.gpu)[0]
    made = {p.name: point_digest(r.model_dump(mode="json"), p.heal) for p, r in recipes.items()}
    place = Folder(output, _common(source, settings, progress), {DENSE: "", **made})
    with place.held(settings.restart):
        with scratch_folder() as states:
            chains = _chains(place, list(recipes), settings, states)
            _run(chains, settings, progress)
        calibrated = settings.calibration is not None
        speeds = {p: tokens_per_second(source, r, gpu, calibrated) for p, r in recipes.items()}
        result = _result(place, chains, speeds, settings)
        place.finish(result)
        place.write(PAGE, page(result))
    return result


def _common(source: Source, settings: SweepSettings, progress: Progress) -> dict[str, Any]:
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
    found = {DENSE: PointChain(place, DENSE, settings.model, None, evaluate)}
    evaluate = (*evaluate, "--against", settings.model, "--keep-dense", str(states))
    for point in points:
        options = (*_options(point, settings), *here)
        found[point.name] = PointChain(
            place, point.name, settings.model, options, evaluate, settings.keep
        )
    return found


def _options(point: Point, settings: SweepSettings) -> tuple[str, ...]:
    """The options of `blr compress` for a point."""
    text = [] if settings.calibration is None else ["--calibration", settings.calibration]
    return (*point.options, *text, *common_options(settings.common, point))


def _run(chains: dict[str, PointChain], settings: SweepSettings, progress: Progress) -> None:
    """Make what there is no record of, some at once."""
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
            Pool(slots(settings.device, settings.jobs)).run(missing)
    lost = [chain for chain in missing if chain.failure]
    progress.notes([f"{chain.name} failed: {chain.failure}" for chain in lost])


def _result(
    place: Folder,
    chains: dict[str, PointChain],
    speeds: dict[Point, float | None],
    settings: SweepSettings,
) -> dict[str, Any]:
    dense = place.record(DENSE)
    assert dense is not None  # else the sweep has ended
    base = dense.perplexities
    made, failed = dict[str, list[MadePoint]](), []
    for point, speed in speeds.items():
        record = place.record(point.name)
        options = _options(point, settings)
        line = command_line(settings.model, options, point.name)
        if record is None:
            lost = chains[point.name]
            why = {"why": lost.failure, "code": lost.code}
            failed.append({"name": point.name, **why, "command": line})
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
    rows = [
        {**asdict(one), "of_plain": [share_of_plain(found, one, text) for text in texts]}
        for one in found
    ]
    return {
        "model": settings.model,
        "texts": [str(path) for path in settings.texts],
        "dense": base,
        "gpu": chosen_gpu(settings.gpu)[0].name,
        "points": rows,
        "failed": failed,
        "frontier": [one.name for one in frontier(found)],
    }
