"""Commands that time kernels and models on this machine: bench and tune. The options of each are the
fields of its settings in `blr.bench.options` (scripts/bench)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from blr.bench.options import (
    DecodeOptions,
    LayerOptions,
    MemoryOptions,
    PrefillOptions,
    TuneOptions,
    of_text,
)
from blr.bench.results import BenchReport, check_output, publish
from blr.bench.shapes import layer_work
from blr.compressor.base.progress import Progress
from blr.compressor.cli.options import Format, FormatOption, Quiet, expanded, options_for, taking
from blr.compressor.cli.streams import report_now

bench_app = typer.Typer(
    help="Time layers and models against dense and other implementations.",
    pretty_exceptions_enable=False,
)
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", callback=expanded, help="Write results.json here.")
]


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
        if output is not None:
            check_output(output)
        progress = Progress(quiet)
        progress.loading()
        run = getattr(import_module(f"blr.bench.{name}"), f"run_{name}")
        report, code = run(asked, progress)
        finish(report, code, output, format)

    command.__doc__ = said
    bench_app.command(name)(taking(options_for(settings))(command))


add_command("layers", LayerOptions, "Time layers: dense, plain torch, torch.compile and ours.")
add_command("decode", DecodeOptions, "Time decoding: transformers compiled, and our runtime.")
add_command("prefill", PrefillOptions, "Time prompts in transformers, in bf16 and fp8.")
add_command("memory", MemoryOptions, "Measure memory of a forward pass: dense, low-rank and ours.")


TUNED = "~/.cache/blr/tuned/GPU.yaml, which is read first"
Table = Annotated[
    Path | None,
    typer.Option("--output", "-o", callback=expanded, help="Write this YAML file.", show_default=TUNED),
]


@taking(options_for(TuneOptions))
def tune(
    output: Table = None, quiet: Quiet = False, format: FormatOption = Format.text, **options: object
) -> None:
    """Time the kernels on this GPU, and write the table by which layers choose them."""
    asked: TuneOptions = of_text(TuneOptions, options)
    from blr.bench.tune import Interrupted, run_tune

    try:
        run_tune(asked, output, quiet, format is Format.json)
    except Interrupted as stop:
        report_now(stop.said, stop.code)
        raise typer.Exit(stop.code) from None
