"""Rows of a benchmark, the report that holds them, its files and its text. No torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from blr.bench.checks import WrongResult
from blr.compressor import __version__
from blr.compressor.base.disk import fsync_folder, write_probe, write_stream
from blr.compressor.base.errors import BlrError, OutputError
from blr.compressor.base.exhaustion import exhausted, storage_errors
from blr.compressor.base.quoting import named_line
from blr.compressor.base.tables import aligned
from blr.compressor.workspace.ownership import check_outside

if TYPE_CHECKING:
    from blr.bench.timing import Spread

OK, WRONG, OOM, FAILED = "ok", "wrong", "oom", "failed"
NAME = "results.json"


class Column(NamedTuple):
    """Of a table: the attribute of a row that it shows, divided by `scale`. Rows that are not right show
    their status where `judged`; None is an empty cell."""

    heading: str
    name: str
    form: str = ""
    judged: bool = False
    scale: float = 1

    def cell(self, row: Timed) -> str:
        if self.judged and row.status != OK:
            return row.status
        value = getattr(row, self.name)
        return "" if value is None else f"{value if self.scale == 1 else value / self.scale:{self.form}}"


TIMES = (Column("ms", "ms", ".4g", judged=True), Column("quartiles", "quartiles"))
REST = (Column("error", "rel_error", ".1e"), Column("", "note"))


@dataclass(kw_only=True)
class Timed:
    """What every row has, and how a table of rows is laid out.

    Attributes:
        status: ok, wrong (no time), oom or failed; `note` says why.
        ms, low, high: median and quartiles of `rounds` samples in milliseconds.
        rel_error: of the result against the right one; None for what others are compared with.
        title: heading of rows that belong together. right: columns of numbers.
    """

    columns: ClassVar[Sequence[Column]] = ()
    title: ClassVar[str] = ""
    right: ClassVar[range] = range(0)
    status: str = OK
    note: str | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    rel_error: float | None = None

    @property
    def quartiles(self) -> str | None:
        """As "1.2–1.4"."""
        return None if self.ms is None else f"{self.low:.4g}–{self.high:.4g}"

    @staticmethod
    def head(machine: Mapping[str, Any]) -> str:
        """First line of the table."""
        return str(machine.get("name"))

    @staticmethod
    def summary(rows: Sequence[Any]) -> dict[str, Any]:
        """What the last line says of all rows."""
        return {}

    def fill(self, found: Spread) -> None:
        """Take what was timed."""
        self.ms, self.low, self.high, self.rounds = found.ms, found.low, found.high, found.rounds

    def record(self, error: Exception) -> None:
        """Take back the time, if any, for what an arm has raised."""
        self.ms = self.low = self.high = None
        if isinstance(error, WrongResult):
            self.rel_error = error.error if isfinite(error.error) else None
            self.status, self.note = WRONG, str(error)
        elif exhausted(error) is not None:
            self.status, self.note = OOM, "out of memory"
        else:
            self.status, self.note = FAILED, named_line(error)


def nested(entries: Iterable[tuple[Any, ...]]) -> dict[Any, Any]:
    """The last value of each entry in dictionaries of the values before it."""
    found: dict[Any, Any] = {}
    for *keys, last, value in entries:
        inner = found
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return found


@dataclass
class BenchReport:
    """Everything a run found out so far. `stopped`: why it ended early, if it did; `kind`: of `rows`."""

    command: str
    settings: Mapping[str, Any]
    kind: type[Timed] = Timed
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    stopped: str | None = None
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_dict(self, rows: bool = True) -> dict[str, Any]:
        """JSON-ready; without `rows` it is what fits on a last line."""
        head = {
            **{"command": self.command, "date": self.date, "versions": versions()},
            **{"machine": self.machine, "settings": self.settings, "seconds": round(self.seconds, 1)},
            **{"stopped": self.stopped, "summary": self.kind.summary(self.rows) | self.statuses()},
        }
        return {**head, "rows": [asdict(row) for row in self.rows]} if rows else head

    def statuses(self) -> dict[str, dict[str, int]]:
        """How many rows have each status."""
        every = [row.status for row in self.rows]
        return {"statuses": {status: every.count(status) for status in sorted(set(every))}}

    def text(self) -> str:
        """A table: a line a row, rows of one title under it."""
        lines: list[Sequence[str] | str] = [self.kind.head(self.machine)]
        lines.append([column.heading for column in self.kind.columns])
        for title, rows in groupby(self.rows, key=self.kind.title.format):
            lines += [title, *([column.cell(row) for column in self.kind.columns] for row in rows)]
        return aligned(lines, numbers=self.kind.right)


def versions() -> dict[str, str | None]:
    """Versions of blr, torch and triton."""
    found: dict[str, str | None] = {"blr": __version__}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_output(folder: Path) -> None:
    """Make `folder` and see that it can be written to and holds nothing that results would replace.

    Raises:
        OutputError: one line with what was found and what to do.
    """
    if folder == Path():
        raise OutputError("output: the current folder; give the name of a folder for the results")
    check_outside(folder / NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_probe(folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(f"output {folder}: cannot be written to ({reason}); give another") from error
    if os.path.lexists(folder / NAME):
        raise OutputError(f"output {folder}: already holds {NAME}; give another folder or remove it")


def save(report: BenchReport, folder: Path) -> None:
    """Write results.json. Raises OutputError or StorageError."""
    text = json.dumps(report.to_dict(), indent=1) + "\n"
    with storage_errors(folder):
        write_stream(folder / NAME, [text.encode()], new=True)
        fsync_folder(folder)


def publish(report: BenchReport, output: Path | None, as_json: bool) -> None:
    """Write the file, then print the table and a line of JSON, or all as JSON. Raises errors of the
    file last."""
    failed: BlrError | None = None
    if output is not None:
        try:
            save(report, output)
        except BlrError as error:
            failed = error
    if not as_json:
        print(report.text())
    print(json.dumps(report.to_dict(rows=as_json)))
    if report.stopped:
        print(f"blr: stopped: {report.stopped}; results are of what was timed before", file=sys.stderr)
    if failed is not None:
        raise failed
