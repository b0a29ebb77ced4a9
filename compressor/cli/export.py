"""`blr export`: a checkpoint with its tensors as the kernels read them, and the decoding runtime."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.from_fields import setting_options, taking
from blr.compressor.cli.options import (
    Format,
    FormatOption,
    OutputFolder,
    Quiet,
    check_text,
    print_result,
)
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.planning.roofline import ASKED


@taking(setting_options(ExportOptions))
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            callback=values.name, help="A folder, dense or compressed by blr, a hub id or a short name."
        ),
    ],
    output: OutputFolder,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Write a checkpoint in the layout of the kernels, with the fused decoding runtime."""
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running:
        from blr.compressor.base.progress import Progress
        from blr.compressor.commands.api import export as run

        running.resumes = False
        running.progress = progress = Progress(quiet)
        summary = run(checkpoint, output, progress=progress, **options)
    print_result(asdict(summary), _export_text, format)


def _export_text(summary: dict[str, Any]) -> str:
    lines = [
        f"output: {summary['output']}",
        *_layers_text(summary),
        f"bytes: {summary['bytes_before']:,} -> {summary['bytes_after']:,}",
        check_text(summary["check"]),
        f"time: {summary['seconds']:.1f} s",
    ]
    if summary["untied_bytes"]:
        added = f"output head: {summary['untied_bytes']:,} bytes beside the embedding it was tied to"
        lines.insert(-1, added)
    if summary["errors"]:
        head = f"{summary['quantize_head']} head" if summary["quantize_head"] else None
        kinds = " and ".join(filter(None, (summary["quantize"], head)))
        errors = ", ".join(f"{kind} {error:.4f}" for kind, error in summary["errors"].items())
        lines.insert(-1, f"{kinds} error by layer type: {errors}")
    return "\n".join(lines)


def _layers_text(summary: dict[str, Any]) -> list[str]:
    if summary["kind"] == "dense":
        return [f"layers: {summary['densified']} structured, made dense"]
    if summary["kind"] == "plain":
        rest = f"; {summary['densified']} of other form, made dense" if summary["densified"] else ""
        return [f"layers: {summary['layers']} low-rank, each two linear ones{rest}"]
    batch, context, chosen = (summary[name] for name in ("batch", "context", "gpu_chosen"))
    why = "" if chosen == ASKED else f" ({chosen})"
    use = f", batch {batch}, context {context} tokens" if context is not None else ""
    layers = f"layers: {summary['layers']} structured, in kernel layout"
    if summary["densified"]:
        layers += f"; {summary['densified']} dense, faster so by the table of this GPU"
    if summary["plain"]:
        layers += f"; {summary['plain']} not quantized, which would not make them smaller"
    return [f"for: {summary['gpu']}{why}{use}", layers]
