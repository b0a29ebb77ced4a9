"""`blr bench`: times of layers and models beside dense and other implementations.

The options of every command are the fields of its settings in `bench/options.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr.compressor.base.errors import BlrError
from blr.compressor.bench.options import (
    DecodeOptions,
    LayerOptions,
    MemoryOptions,
    PrefillOptions,
    of_text,
)
from blr.compressor.bench.results import BenchReport, check_output, save
from blr.compressor.bench.shapes import layer_work
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import setting_options, taking
from blr.compressor.cli.options import Format, FormatOption, Quiet

if TYPE_CHECKING:
    from blr.compressor.base.progress import Progress

bench_app = typer.Typer(
    help="Time layers and models against dense and other implementations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
OutputOption = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"), callback=values.place, help="Folder for results.json and results.csv."
    ),
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
    """Files first, then the table and one line of JSON, or all as JSON.

    Raises what writing the files does, after the results are printed.
    """
    failed: BlrError | None = None
    if output is not None:
        try:
            save(report, output)
        except BlrError as error:
            failed = error
    if format is Format.json:
        print(json.dumps(report.to_dict()))
    else:
        print(report.text(report))
        print(json.dumps(report.to_dict(rows=False)))
    if report.stopped:
        print(f"blr: stopped: {report.stopped}; results are of the cases before", file=sys.stderr)
    if failed is not None:
        raise failed
    if code:
        raise typer.Exit(code)


@bench_app.command("layers")
@taking(setting_options(LayerOptions))
def layers(
    output: OutputOption = None,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Layers of published models: dense, plain torch, torch.compile and ours, interleaved."""
    asked = of_text(LayerOptions, options)
    layer_work(asked, cpu=False)  # what is wrong is told before torch is imported
    progress = begun(output, quiet)
    from blr.compressor.bench.layers import run_layers

    finish(*run_layers(asked, progress), output, format)


@bench_app.command("decode")
@taking(setting_options(DecodeOptions))
def decode(
    output: OutputOption = None,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Decoding of whole models: transformers compiled, ours dense, structured and quantized."""
    asked = of_text(DecodeOptions, options)
    progress = begun(output, quiet)
    from blr.compressor.bench.decode import run_decode

    finish(*run_decode(asked, progress), output, format)


@bench_app.command("prefill")
@taking(setting_options(PrefillOptions))
def prefill(
    output: OutputOption = None,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Prompts through whole models in transformers: dense and structured, bf16 and float8."""
    asked = of_text(PrefillOptions, options)
    progress = begun(output, quiet)
    from blr.compressor.bench.prefill import run_prefill

    finish(*run_prefill(asked, progress), output, format)


@bench_app.command("memory")
@taking(setting_options(MemoryOptions))
def memory(
    output: OutputOption = None,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Memory and time of a forward pass: dense, low rank as it is, and ours within a bound."""
    asked = of_text(MemoryOptions, options)
    progress = begun(output, quiet)
    from blr.compressor.bench.memory import run_memory

    finish(*run_memory(asked, progress), output, format)
