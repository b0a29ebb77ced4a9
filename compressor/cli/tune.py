"""`blr tune`: which kernel variants are the fastest on this GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr.bench.options import TuneOptions, of_text
from blr.compressor.base.device import DTYPES
from blr.compressor.base.errors import BlrError, UsageError
from blr.compressor.base.quoting import printable
from blr.compressor.cli import values
from blr.compressor.cli.failure import report_now
from blr.compressor.cli.from_fields import setting_options, taking
from blr.compressor.cli.options import Format, FormatOption, Quiet

if TYPE_CHECKING:
    from blr.bench.tuning import Tuning


Table = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"),
        callback=values.place,
        help="Write this YAML file.",
        show_default="~/.cache/blr/tuned/GPU.yaml, which is read first",
    ),
]


@taking(setting_options(TuneOptions))
def tune(
    output: Table = None, quiet: Quiet = False, format: FormatOption = Format.text, **options: Any
) -> None:
    """Time the kernels on this GPU, and write the table by which layers choose them."""
    asked: TuneOptions = of_text(TuneOptions, options)
    from blr.bench.checks import find_precision
    from blr.bench.shapes import check_structures, find_layers
    from blr.compressor.recipe.tuned_table import check_table, user_table

    check_structures([name for name in asked.structures if name != "fp8"])
    if wrong := next((name for name in asked.dtype if name not in DTYPES), None):
        raise UsageError(f"dtype {wrong!r}: expected some of {', '.join(DTYPES)}")
    layers = find_layers(asked.shapes)
    if output is not None:
        check_table(output)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.bench import tuning as library
    from blr.bench.harness import Harness
    from blr.bench.layer_problem import KernelTimer
    from blr.bench.results import BenchReport
    from blr.bench.timing import ARM_SECONDS
    from blr.bench.tuning_rules import winners_table
    from blr.kernels.common.available import gpu_key

    target = library.tuning_device(asked.device)
    gpu = asked.gpu_name or gpu_key(target)
    path = output or user_table(gpu)
    check_table(path)
    rounds, tokens = (5, library.QUICK) if asked.quick else (10, library.FULL)
    harness = Harness(BenchReport("tune", {}), progress, target, rounds, asked.seconds, ARM_SECONDS)
    timers = [KernelTimer(target, find_precision(name)) for name in asked.dtype]
    tuning = library.Tuning(timers, asked.structures, tokens)
    code, stopped = harness.run(tuning.cases(layers)), harness.report.stopped
    if code:
        done = f"{len(tuning.points)} cases were timed, nothing was written"
        report_now(f"stopped by {stopped}; {done}", code)
        raise typer.Exit(code)
    try:
        result = tuning.write(path, gpu, target)
    except BlrError:
        talk = sys.stderr if format is Format.json else sys.stdout
        print(_winners(winners_table(tuning.points)), file=talk)
        raise
    _show({**result, "stopped": stopped}, tuning, progress, format)


HEAD = ("structure", "shape", "dtype", "n", "variant", "ms", "dense ms")


def _show(result: dict[str, Any], tuning: Tuning, progress: Any, format: Format) -> None:
    from blr.bench.tuning_rules import winners_table

    progress.notes(tuning.refused)
    if result["stopped"]:
        progress.notes([result["stopped"]])
    winners = winners_table(tuning.points)
    if format is Format.json:
        print(json.dumps({**result, "winners": winners, "refused": tuning.refused}))
        return
    print(f"{printable(result['output'])}: {result['rules']} rules for {result['gpu']}")
    print(_winners(winners))


def _winners(rows: list[dict[str, Any]]) -> str:
    from blr.compressor.base.tables import aligned

    return aligned([HEAD, *map(_cells, rows)], numbers=(3, 5, 6))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = f"{row['inputs']}→{row['outputs']} b={row['blocks']} r={row['rank']}"
    times = [f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("ms", "dense_ms")]
    return row["structure"], shape, row["dtype"], str(row["n"]), row["variant"] or "none", *times
