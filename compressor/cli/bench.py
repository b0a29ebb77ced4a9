"""`blr bench`: times of layers and models beside dense and other implementations.

The options of every command are the fields of its settings in `blr.bench.options` (scripts/bench).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blr.bench.options import (
    DecodeOptions,
    LayerOptions,
    MemoryOptions,
    PrefillOptions,
    of_text,
)
from blr.bench.results import BenchReport, check_output, publish
from blr.bench.shapes import layer_work
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import Format, FormatOption, Quiet, setting_options, taking

if TYPE_CHECKING:
    from blr.compressor.base.progress import Progress

bench_app = typer.Typer(
    help="Time layers and models against dense and other implementations.",
    pretty_exceptions_enable=False,
)
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", callback=values.place, help="Write results.json here."),
]


def begun(output: Path | None, quiet: bool) -> Progress:
    """The progress of a run whose results have a place; torch may be imported now."""
    from blr.compressor.base.progress import Progress

    if output is not None:
        check_output(output)
    progress = Progress(quiet)
    progress.loading()
    return progress


def finish(report: BenchReport, code: int, output: Path | None, format: Format) -> None:
    """Write and print the results, and end the command."""
    publish(report, output, format is Format.json)
    if code:
        raise typer.Exit(code)


def add_command(name: str, settings: type, said: str) -> None:
    """Add the command `name`, which calls `run_NAME` of blr.bench.NAME; `said` is its help."""

    def command(
        output: OutputOption = None,
        quiet: Quiet = False,
        format: FormatOption = Format.text,
        **options: object,
    ) -> None:
        asked = of_text(settings, options)
        if isinstance(asked, LayerOptions):
            layer_work(asked, cpu=False)  # what is wrong is told before torch is imported
        progress = begun(output, quiet)
        run = getattr(import_module(f"blr.bench.{name}"), f"run_{name}")
        report, code = run(asked, progress)
        finish(report, code, output, format)

    command.__doc__ = said
    bench_app.command(name)(taking(setting_options(settings))(command))


add_command("layers", LayerOptions, "Time layers: dense, plain torch, torch.compile and ours.")
add_command("decode", DecodeOptions, "Time decoding: transformers compiled, and our runtime.")
add_command("prefill", PrefillOptions, "Time prompts in transformers, in bf16 and fp8.")
add_command("memory", MemoryOptions, "Measure memory of a forward pass: dense, low-rank and ours.")
