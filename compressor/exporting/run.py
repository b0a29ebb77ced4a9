"""The run of an export: what is planned, written and checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blr.compressor.base.disk import sha256_file
from blr.compressor.base.errors import UsageError
from blr.compressor.base.processes import Processes
from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.exporting.engines import engine_of, plan_for, stored_bits
from blr.compressor.exporting.files import elsewhere, kept_files
from blr.compressor.exporting.forward import write_onnx, write_pt2
from blr.compressor.exporting.job import ExportSummary
from blr.compressor.exporting.options import COMPILED, ENGINES, GRAPH, GRAPH_WEIGHTS, ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan, load_export, plan_export, plan_ordinary
from blr.compressor.exporting.tensors import check_products, in_order, read_tensor
from blr.compressor.loading.native import continues_text
from blr.compressor.loading.sidecar_files import check_carried
from blr.compressor.output.check import Bar, OutputCheck
from blr.compressor.output.files import FolderContents, Written
from blr.compressor.output.folder_run import FolderRun
from blr.compressor.output.loss import file_text
from blr.compressor.output.loss_messages import better_export
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.manifest import read_manifest
from blr.compressor.workspace.scan import scan_source
from blr.compressor.workspace.shards import assign_shards
from blr.compressor.workspace.workspace import Workspace

REMEDY = "repair or compress the checkpoint again"  # for weights that are no numbers
SAME = "kind", "batch", "dtype", "quantize", "quantize_head", "self_contained"  # in a summary
STAGES = {"pt2": ("compiling",), "onnx": ("tracing",)}  # stages after the check, by kind of export


def planned(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan from headers alone what is to be written, and check that it will load."""
    if options.text is not None and not continues_text(checkpoint.source):
        kind = checkpoint.source.model_type
        raise UsageError(f"--text: no {kind} that continues text, leave the option out")
    if options.kind in ENGINES:
        return plan_for(checkpoint, options)
    ordinary = options.kind in ("dense", "plain")
    return (plan_ordinary if ordinary else plan_export)(checkpoint, options)


@dataclass
class ExportRun(FolderRun):
    """One export."""

    plan: ExportPlan
    options: ExportOptions
    workspace: Workspace
    progress: Progress

    def __post_init__(self) -> None:
        self.processes = Processes("cpu", alone=True)
        self.engine = engine_of(self.options.kind)

    def summary(self, seconds: float) -> ExportSummary:
        """The summary of a run that took so many seconds."""
        plan, options, output = self.plan, self.options, self.workspace.output
        source, specs, bits = plan.checkpoint.source, plan.checkpoint.specs, None
        if self.engine is not None:
            sizes = {module: spec.dense_parameters for module, spec in specs.items()}
            stored = sum(each * sizes[module] for module, each in stored_bits(plan).items())
            bits = stored / sum(sizes.values())
        return ExportSummary(
            **{name: getattr(options, name) for name in SAME},
            output=str(output),
            gpu=options.target,
            gpu_chosen=chosen_gpu(options.gpu)[1],
            context=plan.settings.context if plan.settings else None,
            layers=len(specs),
            densified=len(plan.densified),
            bytes_before=source.nbytes,
            bytes_after=plan.nbytes,
            untied_bytes=plan.untied_bytes,
            plain=len(plan.settings.plain) if plan.settings else 0,
            seconds=seconds,
            errors=read_manifest(output).get("quantization_errors", {}),
            check=self.checked,
            commands=self.engine.commands(str(output), plan) if self.engine else [],
            elsewhere=elsewhere(str(source.folder), options.draft) if options.draft else {},
            bits=bits,
        )

    def prepare(self, first: bool) -> None:
        """Check the files that are carried along."""
        self.progress.expect(READING, WRITING, CHECKING, *STAGES.get(self.options.kind, ()))
        check_carried(self.plan.checkpoint.source, self.plan.config)

    def work(self, read: str) -> FolderContents:
        """The planned contents: tensors get their new form as they are written."""
        tensors = self.plan.tensors
        shards = assign_shards(tensors.slots, self.options.max_shard_size) if tensors.slots else {}
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
        told = self.plan.checkpoint.manifest
        run, healed = told.get("run"), "healed_from" in told
        calibrated = healed or (isinstance(run, dict) and run.get("calibration") is not None)
        knows = not self.plan.checkpoint.compressed or calibrated
        return better_export(self.options.quantize, self.options.quantize_head, knows, healed)

    def _check(self, folder: Path) -> Written:
        """Load what was written, and write the compiled forward pass if one is asked for."""
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
        extra = sum(path.stat().st_size for path in source.extras.carried.values())
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
        if told := self.plan.checkpoint.manifest:
            facts["compressed_from"] = told.get("source")
        return json.loads(canonical_json(facts))
