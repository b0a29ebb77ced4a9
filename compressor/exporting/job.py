"""Exports one checkpoint: checks it, writes every tensor in its new form, checks again, commits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from blr.compressor.base.progress import Progress
from blr.compressor.exporting.options import ExportOptions, check_options
from blr.compressor.exporting.origin import open_checkpoint
from blr.compressor.output.folder_run import opened
from blr.compressor.output.loss_messages import CheckFacts


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
    check: CheckFacts | None = None
    commands: list[str] = field(default_factory=list)
    elsewhere: dict[str, str] = field(default_factory=dict)
    bits: float | None = None


def export(folder: Path, output: Path, options: ExportOptions, progress: Progress) -> ExportSummary:
    """Write the checkpoint in `folder`, dense or compressed, to `output` in kernel layout. Everything
    that headers tell is checked first; `output` is absent until it is complete. No more than a few
    tensors are in memory at a time. Raises BlrError of any kind."""
    started = monotonic()
    options = check_options(options)
    progress.loading()
    reads = [folder, *([Path(options.small)] if options.small else [])]
    with opened(output, options, *reads, alone=True) as workspace:
        checkpoint = open_checkpoint(folder, options.allow_pickle, workspace.pickled)
        progress.notes(checkpoint.source.notes() + checkpoint.source.extras.notes())
        from blr.compressor.exporting.run import ExportRun, planned

        run = ExportRun(planned(checkpoint, options), options, workspace, progress)
        progress.notes(list(run.plan.told))
        run.run()
    return run.summary(monotonic() - started)
