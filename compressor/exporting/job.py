"""Exports one checkpoint: checks it, writes every tensor in its new form, checks again, commits."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from blr.compressor.base.errors import OutputError, UsageError
from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.exporting.options import (
    COMPILED,
    ENGINES,
    GRAPH,
    GRAPH_WEIGHTS,
    ExportOptions,
    check_options,
)
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.output.folder_run import FolderRun, opened
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.manifest import read_manifest
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.base.processes import Processes
    from blr.compressor.exporting.engines import Engine
    from blr.compressor.exporting.plan import ExportPlan
    from blr.compressor.output.check import OutputCheck
    from blr.compressor.output.files import FolderContents


@dataclass
class ExportSummary:
    """The result of an export. Sizes are in bytes; `seconds` is the wall time.

    gpu_chosen: why `gpu` is the target. densified: how many layers were made dense. untied_bytes:
    the size of a quantized output head beside the embedding it was tied to. plain: how many layers
    quantization would not make smaller. errors: mean relative errors of quantization by layer type.
    check: the measured loss (`output/check.py`). elsewhere: how other engines
    decode the model with its draft. Of an export for an engine of others: the commands that
    run it, and the bits a weight of its layers in few bits."""

    output: str
    kind: str
    gpu: str
    gpu_chosen: str
    batch: int
    context: int | None
    layers: int
    densified: int
    bytes_before: int
    bytes_after: int
    dtype: str | None
    quantize: str | None
    quantize_head: str | None
    untied_bytes: int
    plain: int
    self_contained: bool
    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    check: dict[str, object] | None = None
    commands: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)
    bits: float | None = None


def export(folder: Path, output: Path, options: ExportOptions, progress: Progress) -> ExportSummary:
    """Write the checkpoint in `folder`, dense or compressed, to `output` in kernel layout.

    Everything that headers tell is checked first; `output` is absent until it is complete. No more
    than a few tensors are in memory at a time.

    Raises:
        BlrError: any of its kinds.
    """
    started = monotonic()
    options = check_options(options)
    progress.loading()
    reads = [folder, *([Path(options.small)] if options.small else [])]
    with opened(output, options, *reads, alone=True) as workspace:
        checkpoint = open_checkpoint(folder, options.allow_pickle, workspace.pickled)
        progress.notes(checkpoint.source.notes() + checkpoint.source.extras.notes())
        run = _planned(checkpoint, options, workspace, progress)
        progress.notes(run.plan.notes)
        run.run()
    return run.summary(monotonic() - started)


def _planned(
    checkpoint: Checkpoint, options: ExportOptions, workspace: Workspace, progress: Progress
) -> ExportRun:
    """Plan from headers alone what is to be written, and check that it will load."""
    from blr.compressor.loading.native import continues_text

    if options.text is not None and not continues_text(checkpoint.source):
        kind = checkpoint.source.model_type
        raise UsageError(f"--text: no {kind} that continues text, leave the option out")
    if options.kind in ENGINES:
        from blr.compressor.exporting.engines import plan_for as planned
    elif options.kind in ("dense", "plain"):
        from blr.compressor.exporting.plan import plan_ordinary as planned
    else:
        from blr.compressor.exporting.plan import plan_export as planned
    return ExportRun(planned(checkpoint, options), options, workspace, progress)


REMEDY = "repair or compress the checkpoint again"  # for weights that are no numbers
STAGES = {"pt2": ("compiling",), "onnx": ("tracing",)}  # stages after the check, by kind of export


@dataclass
class ExportRun(FolderRun):
    """One export."""

    plan: ExportPlan
    options: ExportOptions
    workspace: Workspace
    progress: Progress

    @cached_property
    def processes(self) -> Processes:  # type: ignore[override]
        """One process."""
        from blr.compressor.base.processes import Processes

        return Processes("cpu", alone=True)

    @cached_property
    def engine(self) -> Engine | None:
        """The engine of others that it is for."""
        from blr.compressor.exporting.engines import engine_of

        return engine_of(self.options.kind)

    def summary(self, seconds: float) -> ExportSummary:
        """The summary of a run that took so many seconds."""
        from blr.compressor.exporting.engines import stored_bits
        from blr.compressor.exporting.files import elsewhere

        plan, options, output = self.plan, self.options, self.workspace.output
        source, specs, bits = plan.checkpoint.source, plan.checkpoint.specs, None
        if self.engine is not None:
            sizes = {module: spec.dense_parameters for module, spec in specs.items()}
            bits = sum(b * sizes[module] for module, b in stored_bits(plan).items()) / sum(
                sizes.values()
            )
        return ExportSummary(
            output=str(output),
            kind=options.kind,
            gpu=options.target,
            gpu_chosen=chosen_gpu(options.gpu)[1],
            batch=options.batch,
            context=plan.context,
            layers=len(specs),
            densified=len(plan.densified),
            bytes_before=source.nbytes,
            bytes_after=plan.nbytes,
            dtype=options.dtype,
            quantize=options.quantize,
            quantize_head=options.quantize_head,
            untied_bytes=plan.untied_bytes,
            plain=plan.plain,
            self_contained=options.self_contained,
            seconds=seconds,
            errors=read_manifest(output).get("quantization_errors", {}),
            check=self.checked,
            commands=self.engine.commands(str(output), plan) if self.engine else [],
            elsewhere=elsewhere(str(source.folder), options.draft) if options.draft else {},
            bits=bits,
        )

    def prepare(self, first: bool) -> None:
        """Check the files that are carried along."""
        from blr.compressor.loading.sidecar_files import check_carried

        self.progress.expect(READING, WRITING, CHECKING, *STAGES.get(self.options.kind, ()))
        check_carried(self.plan.checkpoint.source, self.plan.config)

    def work(self, read: str) -> FolderContents:
        """The planned contents: tensors get their new form as they are written."""
        from blr.compressor.exporting.tensors import in_order, read_tensor
        from blr.compressor.output.files import FolderContents
        from blr.compressor.workspace.shards import assign_shards

        tensors = self.plan.tensors
        limit = self.options.max_shard_size
        shards = assign_shards(tensors.slots, limit) if tensors.slots else {}
        return FolderContents(
            {name: in_order(group, tensors.slots) for name, group in shards.items()},
            lambda entry: read_tensor(self.plan.source_of(entry), tensors, entry),
            self.plan.small_files(),
            later=(COMPILED, GRAPH, GRAPH_WEIGHTS),
            beside=self.plan.beside,
            headers=self.plan.headers,
        )

    def make_check(self) -> OutputCheck:
        """Make the check that compares the export with the checkpoint it came from."""
        from blr.compressor.checkpoint.source import open_source
        from blr.compressor.output.check import Bar, OutputCheck
        from blr.compressor.output.loss import file_text

        source, options = self.plan.checkpoint.source, self.options
        source = open_source(source.folder) if self.plan.checkpoint.compressed else source
        bar = Bar(self.workspace.output, self._remedy(), options.force, self.progress.warn, kept=False)
        engine, text = self.engine, options.text
        given = partial(file_text, text, source) if text is not None else lambda: None
        if engine is not None and (missing := " ".join(engine.missing)):
            why = f"{missing} not installed; pip install {missing}"
            self.progress.warn(f"not run as {engine.title} reads it: {why}")
            return OutputCheck(source, self._check, bar, False, why=why)
        load = None if engine is None else engine.load
        return OutputCheck(source, self._check, bar, options.check, given, load)

    def _remedy(self) -> str:
        """Advice on what loses less than this export."""
        from blr.compressor.output.loss_messages import better_export

        told: dict[str, object] = {}
        with suppress(OutputError):  # a dense checkpoint, or one without its manifest
            told = read_manifest(self.plan.checkpoint.source.folder)
        run, healed = told.get("run"), "healed_from" in told
        calibrated = healed or (isinstance(run, dict) and run.get("calibration") is not None)
        knows = not self.plan.checkpoint.compressed or calibrated
        return better_export(self.options.quantize, self.options.quantize_head, knows, healed)

    def _check(self, folder: Path) -> dict[str, tuple[int, str]]:
        """Load what was written, and write the compiled forward pass if one is asked for."""
        from blr.compressor.exporting.forward import write_onnx, write_pt2
        from blr.compressor.exporting.plan import load_export

        written, kind = self.plan.check_loads(folder), self.options.kind
        if self.plan.draft is not None:
            self.plan.draft.check_loads(folder)
        if kind not in STAGES:
            return written
        self.progress.stage(*STAGES[kind])
        model = load_export(folder, self.plan.config, "auto" if kind == "pt2" else "cpu")
        more = write_pt2(model, folder) if kind == "pt2" else write_onnx(model, folder, self.progress)
        return written | more

    def estimate(self) -> int:
        source = self.plan.checkpoint.source
        extra = sum(path.stat().st_size for path in source.extra_files().values())
        compiled = self.plan.tensors.nbytes * {"pt2": 1, "onnx": 2}.get(self.options.kind, 0)  # float32
        return self.plan.nbytes + compiled + extra + (4 << 20)

    def fingerprint(self) -> dict[str, object]:
        options = self.options
        return {
            "source": headers_digest(self.plan.checkpoint.source),
            "revision": options.revision,
            "export": {**self.plan.described, "dtype": options.dtype, "kind": options.kind},
            "densified": self.plan.densified,
            **({"draft": headers_digest(self.plan.draft.source)} if self.plan.draft else {}),
            "max_shard_size": options.max_shard_size,
            "versions": versions(),
        }

    def digest(self) -> str:
        """Read all of the checkpoint and compare it with its manifest. Raises InputError for bytes that
        differ, NumericsError for weights that no layer can have."""
        from blr.compressor.base.disk import sha256_file
        from blr.compressor.exporting.files import kept_files
        from blr.compressor.exporting.tensors import check_products
        from blr.compressor.workspace.scan import scan_source

        source = self.plan.checkpoint.source
        kept = {name: sha256_file(source.folder / name) for name in kept_files(self.plan.checkpoint)}
        scan = scan_source(source, REMEDY, self.progress)
        check_products(source, self.plan.stored, self.options.dtype, scan.norms)
        read = [scan.digest, kept]
        if self.plan.draft is not None:
            read.append(scan_source(self.plan.draft.source, REMEDY, self.progress).digest)
        return hashlib.sha256(canonical_json(read)).hexdigest()

    def facts(self, read: str) -> dict[str, object]:
        facts: dict[str, object] = {
            "source": {"name": self.options.source_name, "revision": self.options.revision},
            "run": self.workspace.fingerprint,
            "input_sha256": read,
        }
        if self.plan.quantizer is not None:
            facts["quantization_errors"] = self.plan.quantizer.mean_errors()
        if self.plan.untied_bytes:
            facts["untied_bytes"] = self.plan.untied_bytes
        if self.plan.checkpoint.saved:
            facts["saved"] = self.plan.checkpoint.saved
        with suppress(OutputError):  # a dense checkpoint, or one without its manifest
            facts["compressed_from"] = read_manifest(self.plan.checkpoint.source.folder).get("source")
        return json.loads(canonical_json(facts))
