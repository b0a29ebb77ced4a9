"""The compression of one checkpoint: plan, fit layer by layer, write, check, heal if asked, commit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from blr.compressor.base import process_environment as environment
from blr.compressor.base.progress import Progress
from blr.compressor.base.threads import use_threads
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading.checked import check_transformers, open_checked
from blr.compressor.output.folder_run import opened
from blr.compressor.output.loss_messages import CheckFacts
from blr.compressor.planning.plan import make_plan, unmeasured
from blr.compressor.planning.sizing import draft_form, sized
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import CompressSettings as Settings


@dataclass
class Summary:
    """Result of a compression. Sizes are in bytes, times in seconds of this run. `layers` were replaced
    by what `became` says, `kept` stay dense. `cf` and `bits` a weight are of both, `share` is the
    replaced part of the parameters, `factor` the compression of the model. `errors` of weights and
    `output_errors` (on the calibration text) are means by layer type."""

    output: str
    method: str
    became: str
    cf: float
    bits: float
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    layers: int
    kept: int
    share: float
    factor: float
    errors: dict[str, float]
    output_errors: dict[str, float]
    seconds: float
    spent: dict[str, float] = field(default_factory=dict)
    check: CheckFacts | None = None
    healed: HealSummary | None = None
    notes: list[str] = field(default_factory=list)
    advice: str | None = None


def compress(
    folder: Path, recipe: Recipe, output: Path, settings: Settings, progress: Progress
) -> Summary | None:
    """Write the compressed checkpoint of `folder` to `output`, resuming an earlier run. All processes
    fit layers; the first does the rest and alone gets a summary. Headers are checked before torch is
    imported. Raises BlrError; finished work stays in ``<output>.blr-partial``."""
    started = monotonic()
    progress.loading()
    settings = replace(settings, threads=use_threads(settings.threads, environment.local_count()))
    first = environment.is_first()
    with opened(output, settings, folder) as workspace:
        source = open_checked(folder, settings.allow_pickle, workspace.pickled)
        if settings.calibration is not None or settings.heal:
            check_transformers(source, "--text and --heal take")
        choose = draft_form if settings.for_draft else sized
        recipe, said = choose(source, recipe, settings.calibration is not None)
        progress.notes([said] * bool(said))
        plan = make_plan(source, recipe)
        if settings.calibration is None:
            plan.notes += unmeasured(recipe, False)
        progress.notes(plan.notes + source.notes() + source.extras.notes())
        from blr.compressor.commands.compress_run import CompressRun

        run = CompressRun(source, plan, recipe, settings, workspace, progress)
        run.run(first)
    return run.summary(monotonic() - started) if first else None
