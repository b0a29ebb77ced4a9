"""The compression of one checkpoint: plan, factorize layer by layer, write, check, commit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.base.threads import use_threads
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.commands.compress_then_heal import Healing, disk_beside, steps_of
from blr.compressor.fitting.memory_forecast import disk_bytes
from blr.compressor.fitting.time_forecast import Work as Sized
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading.checked import check_transformers, open_checked
from blr.compressor.output.loss_messages import advice, better_fit
from blr.compressor.output.records import as_recorded, by_type, is_layer, read_records, tensor_bytes
from blr.compressor.planning.layers import what_became
from blr.compressor.planning.plan import Plan, make_plan, unmeasured
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.planning.speed import paced
from blr.compressor.recipe.schema import Recipe
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.ownership import check_apart
from blr.compressor.workspace.shards import DEFAULT_SHARD_BYTES, assign_shards
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.fitting.work import Work
    from blr.compressor.output.check import Check
    from blr.compressor.output.library_adapters import Door
    from blr.compressor.output.produce import Written

UNHEALED = "unhealed"  # in the partial folder: the compressed checkpoint that is trained


@dataclass(frozen=True)
class Settings:
    """What is not part of the recipe: where and how to run.

    `source_name` and `revision` are recorded in the output; `device` is a torch device name or
    "auto"; `threads` are those of the CPU, None as `use_threads` takes it; `max_shard_size` is in
    bytes; `calibration` names a text file or data set; `check` runs the output before it is committed;
    `heal` are minutes of training after it; `force` writes what loses over a nat a token, too; the rest
    is as on the command line.
    """

    source_name: str
    revision: str | None = None
    device: str = "auto"
    threads: int | None = None
    max_shard_size: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    restart: bool = False
    allow_pickle: bool = False
    calibration: str | None = None
    offline: bool = False
    check: bool = True
    heal: float | None = None
    force: bool = False


@dataclass
class Summary:
    """What a compression achieved. Sizes in bytes.

    `became` says how many layers were made what; `kept` counts layers that were left dense on purpose;
    `cf` is the factor of `layers` and `kept` ones, `bits` what they store for each weight, `share` what
    `layers` are of the model's parameters, `factor` how many times smaller the whole model is; `errors`
    maps layer type to the mean relative error of its weights, `output_errors` to that of its outputs on
    the calibration's text, where there was one; `seconds` is the wall time of this run and `spent` what
    of it went into what, in the first process, the loading of libraries last;
    `check` says what was run of the output, how far its results are from the dense model's and what it
    loses (`output/check.py`), `healed` what training it brought (`commands/heal.py`), `advice` what
    would lose less.
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
    check: dict[str, Any] | None = None
    healed: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    advice: str | None = None


def compress(
    folder: Path, recipe: Recipe, output: Path, settings: Settings, progress: Progress
) -> Summary | None:
    """Write the compressed checkpoint of `folder` to `output`, resuming what an earlier run left.

    Everything that can be checked from headers is checked before torch is imported. `output` is
    absent until it is complete. Where there are several processes (`base/process_environment.py`) all of
    them call this: they fit layers, and the first does the rest and alone gets a summary.

    Raises:
        BlrError: any of its kinds; the work done so far stays in ``<output>.blr-partial``.
    """
    started = monotonic()
    progress.loading()
    check_apart(output, folder)
    settings = replace(settings, threads=use_threads(settings.threads, environment.local_count()))
    if settings.allow_pickle and environment.count() > 1:
        raise UsageError("--allow-pickle is for one process; convert the weights to safetensors first")
    first = environment.is_first()
    workspace = Workspace(
        output, overwrite=settings.overwrite, restart=settings.restart, visiting=not first
    )
    with workspace if first else nullcontext():
        if settings.allow_pickle:
            workspace.claim()
        source = open_checked(folder, settings.allow_pickle, workspace.pickled)
        if settings.calibration is not None or settings.heal:
            check_transformers(source, "--calibration and --heal take")
        recipe, said = paced(source, recipe, settings.calibration is not None)
        progress.notes([said] * bool(said))
        plan = make_plan(source, recipe)
        if settings.calibration is None:
            plan.notes += unmeasured(recipe, False)
        progress.notes(plan.notes + source.notes() + source.extras.notes())
        job = Job(source, plan, recipe, settings, workspace, progress)
        records = job.run() if first else job.help()
    return job.summary(records, monotonic() - started) if first else None


@dataclass(frozen=True)
class Fitted:
    """Factors and record by module; what was `measured`: facts of the `calibration`, and the sensitivity
    curve of each module under `curves`; and refitted norms by tensor."""

    results: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, TensorEntry] = field(default_factory=dict)


@dataclass
class Job:
    """One compression. `plan` is that of the headers until calibration gives a better one."""

    source: Source
    plan: Plan
    recipe: Recipe
    settings: Settings
    workspace: Workspace
    progress: Progress
    checked: dict[str, Any] | None = None
    healed: HealSummary | None = None

    def run(self) -> dict[str, Any]:
        """Fit, write, check and commit, or finish what a killed run had all but committed; every
        layer's record by name."""
        workspace, needed = self.workspace, self._estimate()
        with workspace.room(needed):
            workspace.open(self._fingerprint())
            if kept := workspace.journal.count(is_layer):
                self.progress.say(f"resumed with {kept} of {len(self.plan.layers)} layers")
            steps = steps_of(self.settings, self.recipe, workspace.fingerprint["device"])
            self.progress.expect(*steps)
            from blr.compressor.loading.sidecar_files import check_carried

            self.door.check_fits(self.source, self.plan)
            check_carried(self.source, self.door.config(self.source.config, self.plan))
            healing = Healing(self.source, self.settings) if self.settings.heal else None
            with self.progress.timed("reading"):
                read = self._digest()
            if not self.work.processes.told(workspace.finished(read)):
                self._produce(read, healing)
            self.work.processes.leave()
            return read_records(workspace.output)

    def help(self) -> dict[str, Any]:
        """What a process beside the first does: its share of fits and training. It has no records."""
        processes = self.work.processes
        with self.workspace.room(0, check=False):
            if not processes.told(None):
                self._help_produce()
            processes.leave()
        return {}

    def _help_produce(self) -> None:
        if not self.settings.heal:
            self._fit(None)
            return
        healing = Healing(self.source, self.settings)
        if self.work.processes.told(None):
            self._fit(None)
        read = self.work.processes.told(None)
        folder, place = self.workspace.partial / UNHEALED, (self.workspace, self.progress)
        healing.run(folder, None, read, *place, self.work.processes)

    @cached_property
    def door(self) -> Door:
        """What the library of the model asks of the output."""
        from blr.compressor.output.library_adapters import door_of

        return door_of(self.source)

    @cached_property
    def work(self) -> Work:
        """What fits are done with; the processes of a run wait here for each other."""
        from blr.compressor.fitting.work import Work

        source, recipe, settings = self.source, self.recipe, self.settings
        journal, place = self.workspace.journal, (settings.device, settings.offline)
        work = Work(source, recipe, journal, self.progress, *place)
        self.progress.notes(work.processes.notes)
        return work

    def _produce(self, read: str, healing: Healing | None) -> None:
        check = self._check(healing)
        if healing is None:
            self._write(self.workspace.partial, check, read)
            self.workspace.commit()
        else:
            folder = self.workspace.partial / UNHEALED
            processes = self.work.processes
            if processes.told(not self.workspace.holds_result(folder, read)):
                self._write(folder, check.unjudged, read)
            place = self.workspace, self.progress
            with self.progress.timed("healing"):
                self.healed = healing.run(folder, check, processes.told(read), *place, processes)
        self.checked = check.facts

    def _check(self, healing: Healing | None) -> Check:
        """Compares the output with the source, which runs now."""
        from blr.compressor.output.check import Bar, Check
        from blr.compressor.output.loss import calibration_text

        settings, text = self.settings, self.settings.calibration is not None
        remedy = better_fit(self.recipe, text, bool(settings.heal))
        bar = Bar(self.workspace.output, remedy, settings.force, self.progress.warn)
        reload = partial(self.door.check_reload, self.source)
        given = (self.source, self.recipe, settings.calibration, settings.offline)
        held = partial(calibration_text, *given) if healing is None else healing.held
        return Check(self.source, reload, bar, settings.check, held)

    def _write(self, folder: Path, check: Callable[[Path], Written], read: str) -> None:
        """The compressed checkpoint, whole, in the partial folder or one in it."""
        from blr.compressor.output.files import small_files
        from blr.compressor.output.produce import Contents, slots_of, write_whole

        source, fitted = self.source, self._fit(read)
        results, measured = fitted.results, fitted.measured
        if not self.settings.heal:
            self.work.processes.leave()
        records = {module: record for module, (_, record) in results.items()}
        facts = self._facts(records)
        contents = Contents(
            assign_shards(
                slots_of(source, self.plan, results, fitted.norms),
                *(self.settings.max_shard_size, source.library),
            ),
            self.workspace.journal.reader(source),
            small_files(
                *(source, self.recipe, self.plan, records, {**facts, **measured}),
                config=self.door.config(source.config, self.plan),
                code=self.door.code(),
            ),
        )
        facts["input_sha256"] = read
        write_whole(self.workspace, folder, contents, check, lambda: facts, self.progress)

    def _fit(self, read: str | None) -> Fitted:
        """`read`: the digest of all that is read, None where the first process has it."""
        source, recipe, settings, work = self.source, self.recipe, self.settings, self.work
        if settings.calibration is None:
            from blr.compressor.fitting.factorize import factorize_layers

            with self.progress.timed("fits"):
                return Fitted(factorize_layers(work, self.plan))
        from blr.compressor.fitting.engine import compress_calibrated

        replan = partial(make_plan, source, recipe, calibrated=True)
        found = compress_calibrated(work, replan, settings.calibration, work.processes.told(read))
        self.plan = found.plan
        return Fitted(found.results, {"calibration": found.facts, "curves": found.curves}, found.norms)

    def _estimate(self) -> int:
        """Upper estimate of the disk a run needs: output, journal of factors and small files."""
        calibrated = self.settings.calibration is not None
        sized = Sized(self.source, self.plan, self.recipe, chosen_gpu(None)[0], calibrated)
        return disk_bytes(sized) + (disk_beside(sized, self.settings) if self.settings.heal else 0)

    def _fingerprint(self) -> dict[str, Any]:
        """What a resumed run must agree on. Weights are not in it: each layer's key covers its own,
        or all where statistics depend on them."""
        from blr.compressor.base.device import pick_device

        settings, device = self.settings, pick_device(self.settings.device).type
        return {
            "source": headers_digest(self.source),
            "revision": settings.revision,
            "recipe": self.recipe.model_dump(),
            "max_shard_size": settings.max_shard_size,
            "device": device,
            "threads": settings.threads if device == "cpu" else None,
            "calibration": _calibration(settings),
            "heal": settings.heal,
            "versions": versions(),
        }

    def _digest(self) -> str:
        """SHA-256 over everything that is read. Raises NumericsError for weights that are not finite."""
        from blr.compressor.workspace.scan import scan_source

        replaced = {planned.layer.entry.name for planned in self.plan.layers}
        remedy = "repair the checkpoint or --exclude the layer"
        return scan_source(self.source, replaced, remedy, self.progress).digest

    def _facts(self, records: dict[str, Any]) -> dict[str, Any]:
        """The manifest's account of where the output came from."""
        recipe = canonical_json(self.recipe.model_dump())
        return {
            "source": {"name": self.settings.source_name, "revision": self.settings.revision},
            "recipe_sha256": hashlib.sha256(recipe).hexdigest(),
            "fallbacks": [f"{name}: {note}" for name in records for note in records[name]["notes"]],
            "run": self.workspace.fingerprint,
        }

    def summary(self, records: dict[str, Any], seconds: float) -> Summary:
        """Of this run."""
        source, plan, output = self.source, as_recorded(self.plan, records), self.workspace.output
        before = sum(entry.parameters for entry in source.entries.values())
        bytes_before = sum(entry.nbytes for entry in source.entries.values())
        bytes_after = sum(tensor_bytes(path) for path in output.glob("*.safetensors"))
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
            spent=self._spent(seconds),
            check=self.checked,
            healed=asdict(self.healed) if self.healed is not None else None,
            notes=plan.notes,
            advice=advice(plan, source, bool(self.settings.calibration or self.settings.heal)),
        )

    def _spent(self, seconds: float) -> dict[str, float]:
        """What of so many went into what."""
        spent = self.progress.spent
        rest = {"libraries and the rest": max(seconds - sum(spent.values()), 0.0)}
        return {what: round(time, 1) for what, time in (spent | rest).items()}


def _calibration(settings: Settings) -> str | None:
    if settings.calibration is None:
        return None
    from blr.compressor.text.reading import calibration_digest

    return calibration_digest(settings.calibration)
