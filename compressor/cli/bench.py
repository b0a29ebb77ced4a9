"""`blr bench`: times of layers and models beside dense and other implementations.

The options of every command are the fields of its settings in `bench/options.py`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields
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

Run = Callable[[Any, "Progress"], tuple[BenchReport, int]]

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


@dataclass(frozen=True)
class Bench:
    """One command. `load` imports torch, and gives what measures, the summary of rows and the text of a
    report; `check` refuses wrong options before that."""

    options: type
    help: str
    load: Callable[
        [], tuple[Run, Callable[[Sequence[Any]], dict[str, Any]], Callable[[BenchReport], str]]
    ]
    check: Callable[[Any], object] = lambda options: None


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
    if told.shown is not None:
        given["show_default"] = told.shown
    names = [FLAGS.get(each.name, f"--{each.name}")]
    return keyword(each.name, Annotated[hint, typer.Option(*names, **given)], default)


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Of a function that Typer reads."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def command(bench: Bench) -> Callable[..., None]:
    """The function that Typer makes a command of."""

    def run(**given: Any) -> None:
        kept = {name: given.pop(name) for name in COMMON if name != "device"}
        typed = {name: value for name, value in given.items() if value is not None}
        asked = settings.of_text(bench.options, typed)
        bench.check(asked)
        if kept["output"] is not None:
            check_output(kept["output"])
        from blr.compressor.base.progress import Progress

        progress = Progress(kept["quiet"])
        progress.loading()
        measure, summary, text = bench.load()
        report, code = measure(asked, progress)
        finish(report, code, summary(report.rows), text, kept["output"], kept["format"])

    hints = get_type_hints(bench.options)
    found = [parameter(f, hints[f.name]) for f in fields(bench.options) if f.metadata]
    found += [keyword(name, *said) for name, said in COMMON.items()]
    run.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in found}
    run.__doc__ = bench.help
    return run


def finish(
    report: BenchReport,
    code: int,
    summary: dict[str, Any],
    text: Callable[[BenchReport], str],
    output: Path | None,
    format: Format,
) -> None:
    """Files first, then the table and one line of JSON, or all as JSON.

    Raises what writing the files does, after the results are printed.
    """
    failed: BlrError | None = None
    if output is not None:
        try:
            save(report, summary, output)
        except BlrError as error:
            failed = error
    if format is Format.json:
        print(json.dumps(report.to_dict(summary)))
    else:
        print(text(report))
        print(json.dumps(report.to_dict(summary, rows=False)))
    if report.stopped:
        print(f"blr: stopped: {report.stopped}; results are of the cases before", file=sys.stderr)
    if failed is not None:
        raise failed
    if code:
        raise typer.Exit(code)


def _layers() -> Any:
    from blr.compressor.bench.layers import layers_summary, run_layers
    from blr.compressor.bench.results import layers_text

    return run_layers, layers_summary, layers_text


def _decode() -> Any:
    from blr.compressor.bench.decode import decode_summary, run_decode
    from blr.compressor.bench.results import decode_text

    return run_decode, decode_summary, decode_text


def _prefill() -> Any:
    from blr.compressor.bench.prefill import prefill_summary, run_prefill
    from blr.compressor.bench.results import prefill_text

    return run_prefill, prefill_summary, prefill_text


def _memory() -> Any:
    from blr.compressor.bench.memory import memory_summary, run_memory
    from blr.compressor.bench.results import memory_text

    return run_memory, memory_summary, memory_text


COMMANDS = {
    "layers": Bench(
        settings.LayerOptions,
        "Layers of published models: dense, plain torch, torch.compile and ours, interleaved.",
        _layers,
        lambda options: layer_work(options, cpu=False),  # what is wrong is told before torch is imported
    ),
    "decode": Bench(
        settings.DecodeOptions,
        "Decoding of whole models: transformers compiled, ours dense, structured and quantized.",
        _decode,
    ),
    "prefill": Bench(
        settings.PrefillOptions,
        "Prompts through whole models in transformers: dense and structured, bf16 and float8.",
        _prefill,
    ),
    "memory": Bench(
        settings.MemoryOptions,
        "Memory and time of a forward pass: dense, low rank as it is, and ours within a bound.",
        _memory,
    ),
}
for _name, _bench in COMMANDS.items():
    bench_app.command(_name)(command(_bench))
