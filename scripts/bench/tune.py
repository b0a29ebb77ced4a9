"""`blr tune`: the kernels timed on this GPU, the table written, and what came out in words."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.bench.checks import find_precision
from blr.bench.options import TuneOptions
from blr.bench.shapes import check_structures, find_layers
from blr.bench.tuned_files import check_table
from blr.compressor.base.device import DTYPES
from blr.compressor.base.errors import BlrError, UsageError
from blr.compressor.base.quoting import printable
from blr.compressor.recipe.tuned_table import user_table

if TYPE_CHECKING:
    from blr.bench.tuning import Tuning

HEAD = ("structure", "shape", "dtype", "n", "variant", "ms", "dense ms")


@dataclass
class Interrupted(Exception):
    """A signal ended the run: `code` is the exit code, `said` what to tell."""

    code: int
    said: str


def run_tune(asked: TuneOptions, output: Path | None, quiet: bool, as_json: bool) -> None:
    """Time what `asked` names, write the table and print the winners. Raises Interrupted."""
    check_structures(asked.structures)
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
        raise Interrupted(code, f"stopped by {stopped}; {done}")
    try:
        result = tuning.write(path, gpu, target)
    except BlrError:
        print(_winners(tuning), file=sys.stderr if as_json else sys.stdout)
        raise
    progress.notes(tuning.refused if stopped is None else [*tuning.refused, stopped])
    if as_json:
        told = {"winners": tuning.winners(), "refused": tuning.refused}
        print(json.dumps({**result, "stopped": stopped, **told}))
    else:
        print(f"{printable(result['output'])}: {result['rules']} rules for {result['gpu']}")
        print(_winners(tuning))


def _winners(tuning: Tuning) -> str:
    from blr.compressor.base.tables import aligned

    return aligned([HEAD, *map(_cells, tuning.winners())], numbers=(3, 5, 6))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    shape = f"{row['inputs']}→{row['outputs']} b={row['blocks']} r={row['rank']}"
    times = [f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("ms", "dense_ms")]
    return row["structure"], shape, row["dtype"], str(row["n"]), row["variant"] or "none", *times
