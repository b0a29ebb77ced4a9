"""`blr export`: a checkpoint with its tensors as the kernels read them, and the decoding runtime."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.from_fields import (
    Format,
    FormatOption,
    OutputFolder,
    Quiet,
    print_result,
    setting_options,
    taking,
)
from blr.compressor.cli.summary import (
    PROMPT,
    Line,
    check_lines,
    generates,
    laid_out,
    next_line,
    size_line,
    time_line,
)
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.planning.roofline import ASKED

FIRST = """output kind dense_rest quantize quantize_head kv_quantize context
batch gpu self_contained draft text overwrite quiet"""


@taking(setting_options(ExportOptions), first=FIRST)
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
    **options: object,
) -> None:
    """Write a checkpoint for fast decoding, or for other tools (--as)."""
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running:
        from blr.compressor.base.progress import Progress
        from blr.compressor.commands.api import export as run

        running.resumes = False
        running.progress = progress = Progress(quiet)
        summary = run(checkpoint, output, progress=progress, **options)
    print_result(asdict(summary), _export_text, format)


def _export_text(summary: dict[str, Any]) -> str:
    head = f"{summary['quantize_head']} head" if summary["quantize_head"] else None
    kinds = " and ".join(filter(None, (summary["quantize"], head)))
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in summary["errors"].items())
    runs = summary["kind"] in ("folder", "dense", "plain") and generates(summary["check"])
    added = f"{summary['untied_bytes']:,} bytes beside the embedding it was tied to"
    return laid_out(
        (
            ("output", summary["output"]),
            *_layers_lines(summary),
            size_line(summary),
            *check_lines(summary["check"]),
            ("output head", added if summary["untied_bytes"] else ""),
            ("error", f"of {kinds}, by layer type: {errors}" if errors else ""),
            time_line(summary),
            *(("run", command) for command in summary["commands"]),
            *summary["elsewhere"].items(),
            *([next_line("generate", summary["output"], PROMPT)] if runs else []),
        )
    )


def _layers_lines(summary: dict[str, object]) -> list[Line]:
    if summary["kind"] == "dense":
        return [("layers", f"{summary['densified']} structured, made dense")]
    if summary["kind"] == "plain":
        rest = f"; {summary['densified']} of other form, made dense" if summary["densified"] else ""
        return [("layers", f"{summary['layers']} low-rank, each two linear ones{rest}")]
    if summary["commands"]:
        rest = f"; {summary['densified']} of other form, made dense" if summary["densified"] else ""
        kept = f"{summary['layers']} in few bits, {summary['bits']:.3f} bits a weight"
        return [("layers", f"{kept}{rest}")]
    batch, context, chosen = (summary[name] for name in ("batch", "context", "gpu_chosen"))
    why = "" if chosen == ASKED else f" ({chosen})"
    use = f", batch {batch}, context {context} tokens" if context is not None else ""
    layers = f"{summary['layers']} structured, in kernel layout"
    if summary["plain"]:
        layers += f"; {summary['plain']} not quantized, which would not make them smaller"
    place = "in this folder" if summary["self_contained"] else "in the installed package blr-compress"
    return [("for", f"{summary['gpu']}{why}{use}"), ("layers", layers), ("kernels", place)]
