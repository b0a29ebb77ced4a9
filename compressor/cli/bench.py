"""`blr bench`: times of layers and models beside dense and other implementations.

The options of every command are the fields of its settings in `bench/options.py`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from blr.compressor.base.errors import BlrError
from blr.compressor.bench import options as settings
from blr.compressor.bench.results import BenchReport, check_output, save
from blr.compressor.bench.shapes import layer_work
from blr.compressor.cli import values
from blr.compressor.cli.options import Device, Format, FormatOption, Quiet

if TYPE_CHECKING:
    from blr.compressor.base.progress import Progress

Measure = Callable[[Any, "Progress"], tuple[BenchReport, int]]  # imports torch

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
# What every command takes beside its settings, by name: annotation and default.
COMMON: dict[str, tuple[Any, Any]] = {
    "output": (OutputOption, None),
    "device": (Device, "auto"),
    "quiet": (Quiet, False),
    "format": (FormatOption, Format.text),
}
FLAGS = {"compiling": "--compile/--no-compile"}  # of fields that are called otherwise


def parameter(each: Field[Any], hint: Any) -> inspect.Parameter:
    """The option of a field: lists as text, numbers within their limits."""
    told: settings.OptionText = each.metadata["told"]
    given: dict[str, Any] = {"help": told.help}
    default: Any = each.default
    if isinstance(default, tuple):
        hint, default = (str, ",".join(map(str, default))) if default else (str | None, None)
    elif hint is int:
        given |= {"min": told.least, "callback": values.count}
    elif each.name == "cf":
        given |= {"callback": values.factor}
    elif hint == float | None:
        given |= {"min": 0.0, "callback": values.number}
    elif each.name == "gpu_name":
        given["callback"] = values.gpu_name
    if told.shown is not None:
        given["show_default"] = told.shown
    names = [FLAGS.get(each.name, f"--{each.name.replace('_', '-')}")]
    return keyword(each.name, Annotated[hint, typer.Option(*names, **given)], default)


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Of a function that Typer reads."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def with_options(
    options: type, common: dict[str, tuple[Any, Any]], body: Callable[..., None], about: str | None
) -> Callable[..., None]:
    """The function that Typer makes a command of: it calls `body` with the options and with the rest of
    `common`, annotation and default by name."""

    def run(**given: Any) -> None:
        kept = {name: given.pop(name) for name in common if name != "device"}
        typed = {name: value for name, value in given.items() if value is not None}
        body(settings.of_text(options, typed), **kept)

    hints = get_type_hints(options)
    found = [parameter(f, hints[f.name]) for f in fields(options) if f.metadata]
    found += [keyword(name, *said) for name, said in common.items()]
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in found}
    run.__doc__ = about
    return run


def command(options: type, measure: Measure) -> Callable[..., None]:
    """A command of `blr bench`."""

    def body(asked: Any, output: Path | None, quiet: bool, format: Format) -> None:
        if options is settings.LayerOptions:
            layer_work(asked, cpu=False)  # what is wrong is told before torch is imported
        if output is not None:
            check_output(output)
        from blr.compressor.base.progress import Progress

        progress = Progress(quiet)
        progress.loading()
        finish(*measure(asked, progress), output, format)

    return with_options(options, COMMON, body, measure.__doc__)


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


def layers(options: settings.LayerOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Layers of published models: dense, plain torch, torch.compile and ours, interleaved."""
    from blr.compressor.bench.layers import run_layers

    return run_layers(options, progress)


def decode(options: settings.DecodeOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Decoding of whole models: transformers compiled, ours dense, structured and quantized."""
    from blr.compressor.bench.decode import run_decode

    return run_decode(options, progress)


def prefill(options: settings.PrefillOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Prompts through whole models in transformers: dense and structured, bf16 and float8."""
    from blr.compressor.bench.prefill import run_prefill

    return run_prefill(options, progress)


def memory(options: settings.MemoryOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Memory and time of a forward pass: dense, low rank as it is, and ours within a bound."""
    from blr.compressor.bench.memory import run_memory

    return run_memory(options, progress)


COMMANDS: dict[type, Measure] = {
    settings.LayerOptions: layers,
    settings.DecodeOptions: decode,
    settings.PrefillOptions: prefill,
    settings.MemoryOptions: memory,
}
for _options, _measure in COMMANDS.items():
    bench_app.command(_measure.__name__)(command(_options, _measure))
