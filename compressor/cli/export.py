"""`blr export`: a checkpoint with its tensors as the kernels read them, and the decoding runtime."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.options import (
    HERE,
    AllowPickle,
    Check,
    Force,
    Format,
    FormatOption,
    MaxShardSize,
    Offline,
    OutputFolder,
    Overwrite,
    Quiet,
    Restart,
    Revision,
    Threads,
    check_text,
    print_result,
)
from blr.compressor.planning.roofline import ASKED


class Kind(StrEnum):
    """What is written."""

    folder = "folder"
    pt2 = "pt2"
    onnx = "onnx"
    dense = "dense"
    plain = "plain"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            callback=values.name, help="A folder, dense or compressed by blr, a hub id or a short name."
        ),
    ],
    output: OutputFolder,
    kind: Annotated[
        Kind,
        typer.Option(
            "--as",
            help="folder; pt2: a compiled forward pass of an encoder beside it; onnx: a graph; "
            "dense: the ordinary checkpoint, for tools that know nothing of blr; plain: low-rank layers "
            "as two linear ones each, for tools that look for those.",
        ),
    ] = Kind.folder,
    gpu: Annotated[
        str | None,
        typer.Option(help="The GPU it is for, a name in configs/gpus.yaml.", show_default=HERE),
    ] = None,
    batch: Annotated[
        int, typer.Option(callback=values.count, help="Sequences decoded at once, at most: 1 to 16.")
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            callback=values.count,
            help="Tokens of prompt and answer.",
            show_default="the model's maximum, 8192 at most",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="as stored")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="int8 or int4: weights in groups of 128, activations as before.")
    ] = None,
    quantize_head: Annotated[
        str,
        typer.Option(
            help="int8, int4 or none: the output head of a causal language model, with or without "
            "--quantize; a head tied to the embedding gets weights of its own."
        ),
    ] = "none",
    kv_quantize: Annotated[
        str | None,
        typer.Option(
            help="int8 or none: keys and values that the runtime keeps; int8 is half the memory.",
            show_default="as the checkpoint's cache",
        ),
    ] = None,
    self_contained: Annotated[
        bool,
        typer.Option(
            "--self-contained",
            help="Put kernels and decoding runtime into the folder, for machines without blr-compress; "
            "without this it carries one file of plain torch.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            callback=values.place,
            help="Text on which the loss of a decoder is measured.",
            show_default="what a small model writes itself",
        ),
    ] = None,
    force: Force = False,
    threads: Threads = None,
    max_shard_size: MaxShardSize = "5GB",
    revision: Revision = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    allow_pickle: AllowPickle = False,
    check: Check = True,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Write a checkpoint in the layout of the kernels, with the fused decoding runtime."""
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running:
        from blr.compressor.base.progress import Progress
        from blr.compressor.base.threads import use_threads
        from blr.compressor.checkpoint.sizes import parse_size
        from blr.compressor.export.job import export as run
        from blr.compressor.export.options import ExportOptions, check_options
        from blr.compressor.loading.resolve import resolve_model
        from blr.compressor.workspace.destination import check_output

        use_threads(threads)
        options = ExportOptions(
            source_name=checkpoint,
            gpu=gpu,
            batch=batch,
            context=context,
            dtype=dtype,
            quantize=quantize,
            quantize_head=quantize_head,
            kv_quantize=kv_quantize,
            kind=kind.value,
            self_contained=self_contained,
            max_shard_size=parse_size(max_shard_size),
            overwrite=overwrite,
            restart=restart,
            allow_pickle=allow_pickle,
            text=text,
            force=force,
            check=check,
        )
        check_options(options)
        running.output, running.resumes = output, False
        check_output(output, overwrite, (checkpoint,))
        found = resolve_model(checkpoint, revision=revision, offline=offline)
        summary = run(found.folder, output, options.named(found.name, found.revision), Progress(quiet))
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
    if summary["kind"] == Kind.dense:
        return [f"layers: {summary['densified']} structured, made dense"]
    if summary["kind"] == Kind.plain:
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
