"""What the bench commands share: lists in options, and results out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from blr.compressor.cli.commands import Format
from blr.compressor.errors import UsageError


def words(text: str) -> list[str]:
    """Comma-separated words, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def counts(option: str, text: str, most: int | None = None) -> list[int]:
    """Comma-separated integers from 1 to `most`. Raises UsageError."""
    found = words(text)
    good = all(w.isascii() and w.isdigit() and 0 < int(w) <= (most or int(w)) for w in found)
    if not found or not good:
        limit = "" if most is None else f" up to {most}"
        raise UsageError(f"{option} is {text!r}: expected positive integers{limit} such as 1,2,4")
    return [int(word) for word in found]


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
    """Files first (plots where matplotlib is), then the table and one line of JSON, or all as JSON."""
    if output is not None:
        save(report, summary, output)
        _draw(report, draw, output)
    if format is Format.json:
        print(json.dumps(report.to_dict(summary)))
    else:
        print(text(report))
        print(json.dumps(report.to_dict(summary, rows=False)))
    if report.stopped:
        print(f"blr: stopped: {report.stopped}; results are of the cases before", file=sys.stderr)
    if code:
        raise typer.Exit(code)


def _draw(report: Any, draw: Callable[[Any, Path], object], output: Path) -> None:
    from blr.compressor.bench.plots import HINT

    try:
        draw(report, output)
    except ImportError:
        print(f"blr: note: {HINT}", file=sys.stderr)
