"""The export of one checkpoint: check, re-lay every tensor as it is written, check again, commit."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from blr.compressor.base.errors import OutputError, UsageError
from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.export.options import (
    COMPILED,
    GRAPH,
    GRAPH_WEIGHTS,
    ExportOptions,
    check_options,
)
from blr.compressor.export.origin import Checkpoint, open_checkpoint
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.workspace.journal import canonical_json, headers_digest, versions
from blr.compressor.workspace.manifest import read_manifest
from blr.compressor.workspace.ownership import check_apart
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.export.plan import ExportPlan
    from blr.compressor.output.check import Check


@dataclass
class ExportSummary:
    """What an export holds. Sizes in bytes; `gpu_chosen` says why it is for this `gpu`; `densified`
    counts layers made dense because the table of the GPU says so; `untied_bytes` are those of a
    quantized output head that was the embedding, which is stored as well; `plain` counts structured
    layers that packing would not make smaller; `errors` maps layer type to the mean relative error that
    quantization adds; `seconds` is the wall time; `check` says what was run, how far its results are
    from the checkpoint's and what is lost beside it (`output/check.py`)."""

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
    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    check: dict[str, Any] | None = None


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
    check_apart(output, folder)
    with Workspace(output, overwrite=options.overwrite, restart=options.restart) as workspace:
        if options.allow_pickle:
            workspace.claim()
        checkpoint = open_checkpoint(folder, options.allow_pickle, workspace.pickled)
        progress.notes(checkpoint.source.notes() + checkpoint.source.extras.notes())
        job = _make_job(checkpoint, options, workspace, progress)
        progress.notes(job.plan.notes)
        job.run()
    plan = job.plan
    before = sum(entry.nbytes for entry in checkpoint.source.entries.values())
    return ExportSummary(
        output=str(workspace.output),
        kind=options.kind,
        gpu=options.target,
        gpu_chosen=chosen_gpu(options.gpu)[1],
        batch=options.batch,
        context=plan.context,
        layers=len(plan.checkpoint.specs),
        densified=len(plan.densified),
        bytes_before=before,
        bytes_after=plan.tensors.nbytes,
        dtype=options.dtype,
        quantize=options.quantize,
        quantize_head=options.quantize_head,
        untied_bytes=plan.untied_bytes,
        plain=plan.plain,
        seconds=monotonic() - started,
        errors=job.errors(),
        check=job.checked,
    )


def _make_job(
    checkpoint: Checkpoint, options: ExportOptions, workspace: Workspace, progress: Progress
) -> Job:
    """Find out, from headers alone, what is to be written and that it will load."""
    from blr.compressor.loading.native import continues_text

    if options.text is not None and not continues_text(checkpoint.source):
        kind = checkpoint.source.model_type
        raise UsageError(f"--text: no {kind} that continues text, leave the option out")
    if options.kind == "dense":
        from blr.compressor.export.dense import DenseJob, plan_dense

        return DenseJob(plan_dense(checkpoint, options), options, workspace, progress)
    if options.kind == "plain":
        from blr.compressor.export.plain import PlainJob, plan_plain

        return PlainJob(plan_plain(checkpoint, options), options, workspace, progress)
    from blr.compressor.export.plan import plan_export

    return Job(plan_export(checkpoint, options), options, workspace, progress)


STAGES = {"pt2": ("compiling",), "onnx": ("tracing",)}  # behind the check, by what is exported


@dataclass
class Job:
    """One export. `checked` says, once it is written, what was run of it."""

    plan: ExportPlan
    options: ExportOptions
    workspace: Workspace
    progress: Progress
    checked: dict[str, Any] | None = None

    def errors(self) -> dict[str, float]:
        """What quantization added to the relative error of the weights, by layer type."""
        return read_manifest(self.workspace.output).get("quantization_errors", {})

    def run(self) -> None:
        """Write, check and commit, or finish what a killed run had all but committed."""
        from blr.compressor.loading.sidecar_files import check_carried

        workspace = self.workspace
        self.progress.expect(READING, WRITING, CHECKING, *STAGES.get(self.options.kind, ()))
        needed = self._estimate()
        with workspace.room(needed):
            workspace.open(self._fingerprint())
            check_carried(self.plan.checkpoint.source, self.plan.config)
            read = self._digest()
            if workspace.finished(read):
                return
            self._produce(read)

    def _produce(self, read: str) -> None:
        from blr.compressor.export.tensors import in_order, read_tensor
        from blr.compressor.output.produce import Contents, produce
        from blr.compressor.workspace.shards import assign_shards

        source, slots = self.plan.checkpoint.source, self.plan.tensors.slots
        shards = assign_shards(slots, self.options.max_shard_size)
        shards = {name: in_order(group, slots) for name, group in shards.items()}
        contents = Contents(
            shards,
            lambda entry: read_tensor(source, self.plan.tensors, entry),
            self._small_files(),
            later=(COMPILED, GRAPH, GRAPH_WEIGHTS),
        )
        facts = partial(self._facts, read)
        check = self._make_check()
        produce(self.workspace, contents, check, facts, self.progress)
        self.checked = check.facts

    def _small_files(self) -> dict[str, bytes | Path]:
        """Everything but weights and manifest."""
        from blr.compressor.export.files import small_files

        plan, name, kind = self.plan, self.options.source_name, self.options.kind
        assert plan.settings is not None
        return small_files(plan.checkpoint, plan.config, plan.settings, name, kind)

    def _make_check(self) -> Check:
        """Run the checkpoint, so that its export can be compared with it."""
        from blr.compressor.checkpoint.source import open_source
        from blr.compressor.output.check import Bar, Check
        from blr.compressor.output.loss import file_text

        source, options = self.plan.checkpoint.source, self.options
        source = open_source(source.folder) if self.plan.checkpoint.compressed else source
        bar = Bar(self.workspace.output, self._remedy(), options.force, self.progress.warn)
        text = options.text
        given = lambda: None if text is None else file_text(text, source)  # noqa: E731
        return Check(source, self._check, bar, options.check, given)

    def _remedy(self) -> str:
        """What loses less than this export."""
        from blr.compressor.output.loss_messages import better_export

        told: dict[str, Any] = {}
        with suppress(OutputError):  # a dense checkpoint, or one without its manifest
            told = read_manifest(self.plan.checkpoint.source.folder)
        run, healed = told.get("run"), "healed_from" in told
        calibrated = healed or (isinstance(run, dict) and run.get("calibration") is not None)
        knows = not self.plan.checkpoint.compressed or calibrated
        return better_export(self.options.quantize, self.options.quantize_head, knows, healed)

    def _check(self, partial: Path) -> dict[str, tuple[int, str]]:
        """Load what was written; with it the compiled forward pass, if that is asked for."""
        from blr.compressor.export.reload import check_reload, load_export

        written = check_reload(self.plan.checkpoint.source, partial, self.plan.config)
        if self.options.kind == "pt2":
            from blr.compressor.export.forward import write_pt2

            self.progress.stage(*STAGES["pt2"])
            written |= write_pt2(load_export(partial, self.plan.config), partial)
        if self.options.kind == "onnx":
            from blr.compressor.export.forward import write_onnx

            self.progress.stage(*STAGES["onnx"])
            written |= write_onnx(load_export(partial, self.plan.config, "cpu"), partial, self.progress)
        return written

    def _estimate(self) -> int:
        """Upper estimate of the bytes of the output."""
        source = self.plan.checkpoint.source
        extra = sum(path.stat().st_size for path in source.extra_files().values())
        compiled = self.plan.tensors.nbytes * {"pt2": 1, "onnx": 2}.get(self.options.kind, 0)  # float32
        return self.plan.tensors.nbytes + compiled + extra + (4 << 20)

    def _fingerprint(self) -> dict[str, Any]:
        """What a run that finishes another's work must agree on."""
        options = self.options
        return {
            "source": headers_digest(self.plan.checkpoint.source),
            "revision": options.revision,
            "export": {**self._described(), "dtype": options.dtype, "kind": options.kind},
            "densified": self.plan.densified,
            "max_shard_size": options.max_shard_size,
            "versions": versions(),
        }

    def _described(self) -> dict[str, Any]:
        """What the folder says it was made for."""
        return self.plan.config["blr"]["export"]

    def _digest(self) -> str:
        """SHA-256 over everything that is read, which is compared with its manifest as it is.

        Raises InputError for bytes that differ, NumericsError for weights that no layer can have.
        """
        from blr.compressor.base.disk import sha256_file
        from blr.compressor.export.files import kept_files
        from blr.compressor.export.tensors import check_products
        from blr.compressor.workspace.scan import scan_source

        source = self.plan.checkpoint.source
        kept = {name: sha256_file(source.folder / name) for name in kept_files(self.plan.checkpoint)}
        floats = {entry.name for entry in source.entries.values() if entry.is_float}
        scan = scan_source(source, floats, "repair or compress the checkpoint again", self.progress)
        check_products(source, self.plan.stored, self.options.dtype, scan.norms)
        return hashlib.sha256(canonical_json([scan.digest, kept])).hexdigest()

    def _facts(self, read: str) -> dict[str, Any]:
        """The manifest's account of where the export came from."""
        facts: dict[str, Any] = {
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
