"""What the bench commands share: options, lists in them, and results out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base.errors import BlrError, UsageError
from blr.compressor.cli import values
from blr.compressor.cli.options import Format
from blr.compressor.cli.values import MOST

Seconds = Annotated[
    float | None,
    typer.Option(min=0.0, callback=values.number, help="Start no further case after this many seconds."),
]
Rounds = Annotated[int, typer.Option(min=1, callback=values.count, help="Measurements of each arm.")]
Factor = Annotated[
    float, typer.Option(callback=values.factor, help="Compression factor of structured layers.")
]
Blocks = Annotated[int, typer.Option(min=2, callback=values.count, help="Blocks of BLAST and Monarch.")]
ModelDtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]
_COUNT = re.compile(r"[0-9]{1,10}")


def words(text: str) -> list[str]:
    """Comma-separated words, each once. Raises UsageError when there is none."""
    if found := list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())):
        return found
    raise UsageError(f"{text!r}: expected names separated by commas")


def counts(option: str, text: str, most: int | None = None) -> list[int]:
    """Comma-separated integers from 1 to `most`. Raises UsageError."""
    found = [word.strip() for word in text.split(",")]
    good = all(_COUNT.fullmatch(w) and 0 < int(w) <= (most or MOST) for w in found)
    if not good:
        limit = "" if most is None else f" up to {most}"
        raise UsageError(f"{option} is {text!r}: expected positive integers{limit} such as 1,2,4")
    return list(dict.fromkeys(map(int, found)))


def finish(
    report: Any,
    code: int,
    summary: dict[str, Any],
    text: Callable[[Any], str],
    save: Callable[[Any, dict[str, Any], Path], object],
    draw: Callable[[Any, Path], object],
    output: Path | None,
    format: Format,
) -> None:
    """Files first (plots where matplotlib is), then the table and one line of JSON, or all as JSON.

    Raises what writing the files does, after the results are printed.
    """
    failed: BlrError | None = None
    if output is not None:
        try:
            save(report, summary, output)
            _draw(report, draw, output)
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


def _draw(report: Any, draw: Callable[[Any, Path], object], output: Path) -> None:
    from blr.compressor.bench.plots import HINT

    try:
        draw(report, output)
    except ImportError:
        print(f"blr: note: {HINT}", file=sys.stderr)
