"""The compression of one checkpoint: plan, factorize layer by layer, write, check, heal if asked,
commit."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from blr.compressor.base import process_environment as environment
from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.base.threads import use_threads
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading.checked import check_transformers, open_checked
from blr.compressor.output.folder_run import FolderRun, opened
from blr.compressor.output.loss_messages import advice, better_fit
from blr.compressor.output.report import as_recorded, by_type, is_layer, read_records, tensor_bytes
from blr.compressor.planning.draft_form import draft_form
from blr.compressor.planning.forecast import disk_bytes
from blr.compressor.planning.forecast_healing import kept_bytes
from blr.compressor.planning.forecast_time import Compression
from blr.compressor.planning.layers import what_became
from blr.compressor.planning.model_size import sized
from blr.compressor.planning.plan import Plan, make_plan, unmeasured
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.recipe.heal_settings import SELF, HealOptions, check_options, healing_steps
from blr.compressor.recipe.run_settings import CompressSettings as Settings
from blr.compressor.recipe.schema import Recipe
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.shards import assign_shards
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.base.processes import Processes
    from blr.compressor.fitting.engine import Outcome
    from blr.compressor.fitting.factorize import Work
    from blr.compressor.healing.data import Reading
    from blr.compressor.output.check import Door, OutputCheck
    from blr.compressor.output.files import FolderContents

UNHEALED = "unhealed"  # in the partial folder: the compressed checkpoint that is trained


@dataclass
class Summary:
    """Result of a compression. Sizes are in bytes, times in seconds of this run.

    `layers` were replaced by what `became` says, `kept` stay dense. `cf` and `bits` a weight are of
    both, `share` is the replaced part of the parameters, `factor` the compression of the model. `errors`
    of weights and `output_errors` (on the calibration text) are means by layer type. `check` is of
    `output/check.py`.
    """

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
    check: dict[str, object] | None = None
    healed: dict[str, object] | None = None
    notes: list[str] = field(default_factory=list)
    advice: str | None = None


def compress(
    folder: Path, recipe: Recipe, output: Path, settings: Settings, progress: Progress
) -> Summary | None:
    """Write the compressed checkpoint of `folder` to `output`, resuming an earlier run.

    All processes fit layers; the first does the rest and alone gets a summary. Headers are checked
    before torch is imported. Raises BlrError; finished work stays in ``<output>.blr-partial``.
    """
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
        run = CompressRun(source, plan, recipe, settings, workspace, progress)
        run.run(first)
    return run.summary(monotonic() - started) if first else None


@dataclass
class CompressRun(FolderRun):
    """One compression. `plan` is that of the headers until calibration gives a better one."""

    source: Source
    plan: Plan
    recipe: Recipe
    settings: Settings
    workspace: Workspace
    progress: Progress
    reading: Reading | None = None  # how the model reads text, where it is healed
    healed: HealSummary | None = None
    made: dict[str, Any] = field(default_factory=dict)  # the manifest's account, once layers are fitted

    @cached_property
    def door(self) -> Door:
        """The parts that depend on the library of the model."""
        from blr.compressor.output.check import door_of

        return door_of(self.source)

    @cached_property
    def fits(self) -> Work:
        """The means of fitting; processes wait here for each other."""
        from blr.compressor.fitting.factorize import Work

        source, recipe, settings = self.source, self.recipe, self.settings
        journal, place = self.workspace.journal, (settings.device, settings.offline)
        work = Work(source, recipe, journal, self.progress, *place)
        self.progress.notes(work.processes.notes)
        return work

    @property
    def processes(self) -> Processes:  # type: ignore[override]
        return self.fits.processes

    @cached_property
    def healing(self) -> HealOptions | None:
        """How it is trained after the fits, if it is."""
        return options_of(self.settings) if self.settings.heal else None

    @property
    def teacher(self) -> Checkpoint:
        return Checkpoint(self.source, {}, compressed=False)

    def prepare(self, first: bool) -> None:
        """Announce what is there already, and check that the output will load and can be healed."""
        if first:
            from blr.compressor.base.device import pick_device
            from blr.compressor.fitting.engine import expected
            from blr.compressor.loading.sidecar_files import check_carried

            if kept := self.workspace.journal.count(is_layer):
                self.progress.say(f"resumed with {kept} of {len(self.plan.layers)} layers")
            device = pick_device(self.settings.device).type
            fits = expected(self.recipe, self.settings.calibration, device)
            heals = healing_steps(self.healing) if self.healing else []
            self.progress.expect(READING, *fits, WRITING, CHECKING, *heals)
            self.door.check_fits(self.source, self.plan)
            check_carried(self.source, self.door.config(self.source.config, self.plan))
        if self.healing is not None:
            from blr.compressor.healing.data import reading_of

            self.reading = reading_of(self.teacher, self.healing)
            self.reading.texts(self.healing, briefly=True)

    def produce(self, read: str, check: OutputCheck | None = None) -> None:
        """As of every run; a healing trains a compressed checkpoint that is kept beside its states."""
        processes, folder = self.processes, self.workspace.partial / UNHEALED
        if self.healing is None or self.reading is None:
            super().produce(read)
            return
        from blr.compressor.commands.heal import HealRun
        from blr.compressor.output.files import write_whole

        check = self.make_check() if processes.first else None
        if processes.told(check is not None and not self.workspace.holds_result(folder, read)):
            contents = self.work(read)
            if contents is not None and check is not None:
                write_whole(self, folder, contents, check.unjudged, read)
        processes.wait()
        started, place = monotonic(), (processes, self.workspace, self.progress)
        with self.progress.timed("healing"):
            student = open_checkpoint(folder)
            run = HealRun(student, self.teacher, self.healing, *place, self.reading)
            run.teacher_digest = read  # it is all that the compression reads
            run.produce(read, check)
        self.healed, self.checked = run.summary(monotonic() - started), check.facts if check else None

    def make_check(self) -> OutputCheck:
        """Compares the output with the source, which runs now."""
        from blr.compressor.output.check import Bar, OutputCheck
        from blr.compressor.output.loss import calibration_text

        settings, text = self.settings, self.settings.calibration is not None
        remedy = better_fit(self.recipe, text, self.healing is not None)
        bar = Bar(self.workspace.output, remedy, settings.force, self.progress.warn)
        reload = partial(self.door.check_reload, self.source)
        given = (self.source, self.recipe, settings.calibration, settings.offline)
        held = partial(calibration_text, *given)
        if self.reading is not None and self.healing is not None:
            held = partial(self.reading.held, self.healing, self.source)
        return OutputCheck(self.source, reload, bar, settings.check, held)

    def work(self, read: str) -> FolderContents | None:
        source, found = self.source, self._fit(read)
        self.plan = found.plan
        if not self.processes.first:
            return None
        from blr.compressor.output.files import FolderContents, slots_of, small_files

        records: dict[str, Any] = {module: record for module, (_, record) in found.results.items()}
        recipe = canonical_json(self.recipe.model_dump())
        self.made = {
            "source": {"name": self.settings.source_name, "revision": self.settings.revision},
            "recipe_sha256": hashlib.sha256(recipe).hexdigest(),
            "fallbacks": [f"{name}: {note}" for name in records for note in records[name]["notes"]],
            "run": self.workspace.fingerprint,
        }
        told = {**self.made, "calibration": found.facts or None, "curves": found.curves}
        slots = slots_of(source, self.plan, found.results, found.norms)
        config, code = self.door.config(source.config, self.plan), self.door.code()
        return FolderContents(
            assign_shards(slots, self.settings.max_shard_size, source.library),
            self.workspace.journal.reader(source),
            small_files(source, self.recipe, self.plan, records, told, config, code),
        )

    def facts(self, read: str) -> dict[str, object]:
        return {**self.made, "input_sha256": read}

    def _fit(self, read: str) -> Outcome:
        from blr.compressor.fitting.engine import Outcome, compress_calibrated
        from blr.compressor.fitting.factorize import factorize_layers

        work, text = self.fits, self.settings.calibration
        if text is None:
            with self.progress.timed("fits"):
                return Outcome(factorize_layers(work, self.plan), self.plan, {}, {}, {})
        replan = partial(make_plan, self.source, self.recipe, calibrated=True)
        return compress_calibrated(work, replan, text, read)

    def estimate(self) -> int:
        """Bytes of the output, the journal of factors and small files."""
        calibrated = self.settings.calibration is not None
        sized = Compression(self.source, self.plan, self.recipe, chosen_gpu(None)[0], calibrated)
        return disk_bytes(sized) + (disk_beside(sized, self.healing) if self.healing else 0)

    def fingerprint(self) -> dict[str, object]:
        """Without weights: a layer's key covers its own, or all where statistics depend on them."""
        from blr.compressor.base.device import pick_device
        from blr.compressor.text.reading import calibration_digest

        settings, device = self.settings, pick_device(self.settings.device).type
        return {
            "source": headers_digest(self.source),
            "revision": settings.revision,
            "recipe": self.recipe.model_dump(),
            "max_shard_size": settings.max_shard_size,
            "device": device,
            "threads": settings.threads if device == "cpu" else None,
            "calibration": None if (text := settings.calibration) is None else calibration_digest(text),
            "heal": settings.heal,
            **({"for_draft": True} if settings.for_draft else {}),
            "versions": versions(),
        }

    def digest(self) -> str:
        """Raises NumericsError for weights that are not finite."""
        from blr.compressor.workspace.scan import scan_source

        replaced = {planned.layer.entry.name for planned in self.plan.layers}
        remedy = "repair the checkpoint or --exclude the layer"
        return scan_source(self.source, remedy, self.progress, replaced).digest

    def summary(self, seconds: float) -> Summary:
        source, output, records = self.source, self.workspace.output, read_records(self.workspace.output)
        plan = as_recorded(self.plan, records)
        before, bytes_before = source.parameters, source.nbytes
        bytes_after = sum(tensor_bytes(path) for path in output.glob("*.safetensors"))
        spent = self.progress.spent
        rest = {"libraries and the rest": max(seconds - sum(spent.values()), 0.0)}
        return Summary(
            output=str(output),
            method=self.recipe.method,
            became=what_became(planned.spec for planned in plan.layers),
            cf=plan.cf,
            bits=plan.bits,
            parameters_before=before,
            parameters_after=before - plan.dense_parameters + plan.structured_parameters,
            bytes_before=bytes_before,
            bytes_after=bytes_after,
            layers=len(plan.layers),
            kept=len(plan.kept),
            share=plan.share or 0.0,
            factor=bytes_before / bytes_after,
            errors=by_type(records, "error"),
            output_errors=by_type(records, "weighted_error"),
            seconds=seconds,
            spent={what: round(time, 1) for what, time in (spent | rest).items()},
            check=self.checked,
            healed=asdict(self.healed) if self.healed is not None else None,
            notes=plan.notes,
            advice=advice(plan, source, bool(self.settings.calibration or self.settings.heal)),
        )


def options_of(settings: Settings) -> HealOptions:
    """The options of `blr heal` for the same as a compression."""
    text = settings.calibration
    return check_options(
        HealOptions(
            source_name=settings.source_name,
            teacher_name=settings.source_name,
            revision=settings.revision,
            data=() if text is None or text == SELF else (text,),
            minutes=settings.heal,
            loss="variation" if settings.for_draft else "kl",
            device=settings.device,
            max_shard_size=settings.max_shard_size,
            offline=settings.offline,
        )
    )


def disk_beside(sized: Compression, healing: HealOptions) -> int:
    """Bytes on disk that a healing takes: the compressed checkpoint and the trainer's state."""
    layers, source = sized.plan.layers, sized.source
    files = sum(path.stat().st_size for path in source.extra_files().values())
    specs = {planned.layer.module: planned.spec for planned in layers}
    compressed = source.nbytes - sized.bytes + sum(planned.bits for planned in layers) // 8
    return compressed + files + kept_bytes(specs, source.entries, healing)
