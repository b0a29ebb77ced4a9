"""The run of a compression: what is fitted, written, checked and healed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from blr.compressor.base.device import pick_device
from blr.compressor.base.processes import Processes
from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.checkpoint.source import Source
from blr.compressor.commands.compress import Settings, Summary
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.fitting.engine import Outcome, compress_calibrated, expected
from blr.compressor.fitting.factorize import Work, factorize_layers
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading.sidecar_files import check_carried
from blr.compressor.output.check import Bar, Door, OutputCheck, door_of
from blr.compressor.output.files import FolderContents, slots_of, small_files, write_whole
from blr.compressor.output.folder_run import FolderRun
from blr.compressor.output.loss import calibration_text
from blr.compressor.output.loss_messages import advice, better_fit
from blr.compressor.output.report import as_recorded, by_type, read_records, tensor_bytes
from blr.compressor.planning.forecast import Compression, disk_bytes
from blr.compressor.planning.forecast_healing import kept_bytes
from blr.compressor.planning.layers import what_became
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import SELF, HealOptions, check_options, healing_steps
from blr.compressor.text.reading import calibration_digest
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.scan import scan_source
from blr.compressor.workspace.shards import assign_shards
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.healing.data import Reading

UNHEALED = "unhealed"  # in the partial folder: the compressed checkpoint that is trained


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
    made: dict[str, object] = field(default_factory=dict)  # the manifest's account, once it is fitted

    @cached_property
    def door(self) -> Door:
        """The parts that depend on the library of the model."""
        return door_of(self.source)

    @cached_property
    def fits(self) -> Work:
        """The means of fitting; processes wait here for each other."""
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
            if kept := self.workspace.journal.count(lambda record: "spec" in record):  # of layers
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

        check = self.make_check() if processes.first else None
        if processes.told(check is not None and not self.workspace.holds_result(folder, read)):
            contents = self.work(read)
            if contents is not None and check is not None:
                write_whole(self, folder, contents, check.unjudged, read)
        processes.wait()
        started, place = monotonic(), (processes, self.workspace, self.progress)
        with self.progress.timed("healing"):
            run = HealRun(open_checkpoint(folder), self.teacher, self.healing, *place, self.reading)
            run.teacher_digest = read  # it is all that the compression reads
            run.produce(read, check)
        self.healed, self.checked = run.summary(monotonic() - started), check.facts if check else None

    def make_check(self) -> OutputCheck:
        """Compares the output with the source, which runs now."""
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
            errors=by_type(records.values(), "error"),
            output_errors=by_type(records.values(), "weighted_error"),
            seconds=seconds,
            spent={what: round(time, 1) for what, time in (spent | rest).items()},
            check=self.checked,
            healed=self.healed,
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
    files = sum(path.stat().st_size for path in source.extras.carried.values())
    specs = {planned.layer.module: planned.spec for planned in layers}
    compressed = source.nbytes - sized.bytes + sum(planned.bits for planned in layers) // 8
    return compressed + files + kept_bytes(specs, source.entries, healing)
