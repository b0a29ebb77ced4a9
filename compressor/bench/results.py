"""Rows of a benchmark, the report that holds them, and the files they are written to."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blr.compressor import __version__
from blr.compressor.checkpoint.disk import fsync_folder, storage_errors, write_stream
from blr.compressor.errors import OutputError

OK, WRONG, OOM, SKIPPED, FAILED = "ok", "wrong", "oom", "skipped", "failed"
JSON_NAME, CSV_NAME = "results.json", "results.csv"


@dataclass
class Row:
    """One arm at one shape.

    Attributes:
        case: rows of one case are compared: they have the same layer or pattern, n and dtype.
        arm: dense, dense-compile, plain, compile, ours or peer:NAME; for Kronecker-sparse patterns
            bmm, einsum, bsr, dense, ours or peer:NAME.
        cf: dense over structured parameters.
        status: ok, wrong (no time), oom, skipped or failed; `note` says why.
        ms, low, high: median and quartiles of `rounds` samples, milliseconds a call.
        speedup: time of the dense arm over `ms`.
        floor_ms, fraction: the roofline at measured ceilings, and floor_ms / ms.
        rel_error: against float64. joules: a call, the whole board's.
    """

    case: str
    model: str
    layer: str
    structure: str
    spec: str
    in_features: int
    out_features: int
    cf: float
    n: int
    dtype: str
    arm: str
    status: str = OK
    note: str | None = None
    variant: str | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    speedup: float | None = None
    floor_ms: float | None = None
    fraction: float | None = None
    rel_error: float | None = None
    joules: float | None = None
    h: float | None = None

    def fail(self, status: str, note: str) -> None:
        """Take back the time, if any, and say why."""
        self.status, self.note = status, note
        self.ms = self.low = self.high = None


@dataclass
class Report:
    """Everything a run found out so far. `stopped`: why it ended early, if it did."""

    command: str
    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    stopped: str | None = None
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_dict(self, summary: dict[str, Any], rows: bool = True) -> dict[str, Any]:
        """JSON-ready; without `rows` it is what fits on a last line."""
        head = {
            **{"command": self.command, "date": self.date, "versions": versions()},
            **{"machine": self.machine, "settings": self.settings, "seconds": round(self.seconds, 1)},
            **{"stopped": self.stopped, "summary": summary},
        }
        return {**head, "rows": [asdict(row) for row in self.rows]} if rows else head


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
    """Make `folder` and see that it can be written to and holds no results yet.

    Raises:
        OutputError: one line with what was found and what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".blr-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(f"output {folder}: cannot be written to ({reason}); give another") from error
    if (folder / JSON_NAME).exists():
        raise OutputError(
            f"output {folder}: already holds {JSON_NAME}; give another folder or remove it"
        )


def save(report: Report, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json and results.csv. Raises OutputError or StorageError."""
    contents = {
        JSON_NAME: json.dumps(report.to_dict(summary), indent=1) + "\n",
        CSV_NAME: _csv(report.rows),
    }
    with storage_errors(folder):
        for name, text in contents.items():
            write_stream(folder / name, [text.encode()])
        fsync_folder(folder)
    return [folder / name for name in contents]


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
