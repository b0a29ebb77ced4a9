"""Rows of a benchmark, the report that holds them, its files and its text. No torch."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.bench.checks import WrongResult
from blr.compressor import __version__
from blr.compressor.base.disk import fsync_folder, write_probe, write_stream
from blr.compressor.base.errors import OutputError
from blr.compressor.base.exhaustion import exhausted, storage_errors
from blr.compressor.base.quoting import named_line
from blr.compressor.base.tables import aligned
from blr.compressor.workspace.ownership import check_outside

if TYPE_CHECKING:
    from blr.bench.timing import Spread

OK, WRONG, OOM, FAILED = "ok", "wrong", "oom", "failed"
JSON_NAME, CSV_NAME = "results.json", "results.csv"


@dataclass(kw_only=True)
class Timed:
    """What every row has.

    Attributes:
        status: ok, wrong (no time), oom or failed; `note` says why.
        ms, low, high: median and quartiles of `rounds` samples in milliseconds.
        rel_error: of the result against the right one; None for what others are compared with.
    """

    status: str = OK
    note: str | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    rel_error: float | None = None

    def fill(self, found: Spread) -> None:
        """Take what was timed."""
        self.ms, self.low, self.high, self.rounds = found.ms, found.low, found.high, found.rounds

    def fail(self, status: str, note: str) -> None:
        """Take back the time, if any, and say why."""
        self.status, self.note = status, note
        self.ms = self.low = self.high = None

    def record(self, error: Exception) -> None:
        """Take back the time for what an arm has raised."""
        if isinstance(error, WrongResult):
            self.rel_error = error.error if isfinite(error.error) else None
            self.fail(WRONG, str(error))
        elif exhausted(error) is not None:
            self.fail(OOM, "out of memory")
        else:
            self.fail(FAILED, named_line(error))


@dataclass
class LayerRow(Timed):
    """One arm of `blr bench layers` at one shape.

    Attributes:
        case: rows of one case are compared: they have the same layer, n and dtype.
        arm: dense, dense-compile, dense-fp8, plain, compile, ours or fp8.
        cf: dense over structured parameters. speedup: time of the dense arm over `ms`.
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
    variant: str | None = None
    speedup: float | None = None


@dataclass
class DecodeRow(Timed):
    """One arm of `blr bench decode` at one model, context and batch.

    Attributes:
        ms, low, high: of a step of `steps`. tokens_per_second: of all rows of the batch together.
        bytes: weights and cache that a step reads. fraction: of the copy bandwidth; floor_ms: at all
            of it. speedup: over the baseline at the same context and batch.
        rel_error: of logits against eager transformers on the same weights. equal_tokens: leading
            greedy tokens equal to those of transformers' generate, the least of all rows.
    """

    model: str
    arm: str
    context: int
    batch: int
    dtype: str
    steps: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    bytes: int | None = None
    floor_ms: float | None = None
    fraction: float | None = None
    equal_tokens: int | None = None


@dataclass
class MemoryRow(Timed):
    """One arm of `blr bench memory` at one model, batch and length.

    Attributes:
        keep: share of the parameters of the replaced layers. arm: dense, naive (low rank, unfused),
            whole, ours, or ours-N for a bound of N MiB.
        transient_bytes: the most that a forward pass allocates beside what was there, its result
            included. peak_bytes: with the weights.
        memory_of_naive, time_of_naive, memory_of_dense, time_of_dense: ratios to these arms.
        rel_error: of low rank against the same weights in float32.
    """

    model: str
    keep: float
    batch: int
    length: int
    dtype: str
    arm: str
    transient_bytes: int | None = None
    peak_bytes: int | None = None
    weights_bytes: int | None = None
    memory_of_naive: float | None = None
    memory_of_dense: float | None = None
    time_of_naive: float | None = None
    time_of_dense: float | None = None


@dataclass
class PrefillRow(Timed):
    """One arm of `blr bench prefill` at one model and number of tokens.

    Attributes:
        way: "" eager, "compiled", "graph" or "runtime". ms, low, high: to the first token.
        of_dense, of_dense_fp8: times as fast as these arms, run in the same way (the runtime: as the
            faster of eager and compiled ones).
        rel_error: of logits, of float8 against its weights dequantized, of compiled against eager.
    """

    model: str
    arm: str
    way: str
    tokens: int
    batch: int
    of_dense: float | None = None
    of_dense_fp8: float | None = None


@dataclass
class BenchReport:
    """Everything a run found out so far. `stopped`: why it ended early, if it did; `kind`: of `rows`."""

    command: str
    settings: Mapping[str, Any]
    kind: type[Timed] = LayerRow
    summary: Callable[[Sequence[Any]], dict[str, Any]] = lambda rows: {}
    text: Callable[[BenchReport], str] = lambda report: ""
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
            **{"stopped": self.stopped, "summary": self.summary(self.rows) | statuses(self.rows)},
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


def statuses(rows: Sequence[Timed]) -> dict[str, dict[str, int]]:
    """How many rows have each status."""
    found = sorted({row.status for row in rows})
    return {"statuses": {status: sum(row.status == status for row in rows) for status in found}}


def check_output(folder: Path) -> None:
    """Make `folder` and see that it can be written to and holds nothing that results would replace.

    Raises:
        OutputError: one line with what was found and what to do.
    """
    if folder == Path():
        raise OutputError("output: the current folder; give the name of a folder for the results")
    check_outside(folder / JSON_NAME)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_probe(folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(f"output {folder}: cannot be written to ({reason}); give another") from error
    for name in (JSON_NAME, CSV_NAME):
        if os.path.lexists(folder / name):
            raise OutputError(f"output {folder}: already holds {name}; give another folder or remove it")


def save(report: BenchReport, folder: Path) -> None:
    """Write results.json and results.csv. Raises OutputError or StorageError."""
    contents = {JSON_NAME: json.dumps(report.to_dict(), indent=1) + "\n", CSV_NAME: _csv(report)}
    with storage_errors(folder):
        for name, text in contents.items():
            write_stream(folder / name, [text.encode()], new=True)
        fsync_folder(folder)


def _csv(report: BenchReport) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(report.kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in report.rows)
    return text.getvalue()


Column = tuple[str, Callable[[Any], str]]  # its heading, and the cell of a row


def shown(heading: str, name: str, form: str = "", scale: float = 1) -> Column:
    """A column of an attribute, empty where that is None."""

    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value if scale == 1 else value / scale:{form}}"

    return heading, cell


def or_status(heading: str, name: str, form: str, scale: float = 1) -> Column:
    """The same, with the status of an arm that is not right."""
    _, cell = shown(heading, name, form, scale)
    return heading, lambda row: cell(row) if row.status == OK else row.status


TIMES = [
    or_status("ms", "ms", ".4g"),
    ("quartiles", lambda row: "" if row.ms is None else f"{row.low:.4g}–{row.high:.4g}"),
]
REST = [shown("error", "rel_error", ".1e"), shown("", "note")]
LAYERS = [
    *(shown("structure", "structure"), shown("rank", "spec"), shown("arm", "arm")),
    *(shown("variant", "variant"), *TIMES, shown("x dense", "speedup", ".4g"), *REST),
]
DECODE = [
    *(shown("arm", "arm"), or_status("tokens/s", "tokens_per_second", ".1f")),
    *(shown("x base", "speedup", ".4g"), shown("ms/step", "ms", ".4g")),
    *(shown("floor", "floor_ms", ".4g"), shown("of it", "fraction", ".0%")),
    *(shown("GB/step", "bytes", ".4g", 1e9), *REST),
]
PREFILL = [
    *(shown("arm", "arm"), shown("", "way"), *TIMES, shown("x dense", "of_dense", ".4g")),
    *(shown("x dense fp8", "of_dense_fp8", ".4g"), *REST),
]
MEMORY = [
    *(shown("arm", "arm"), shown("transient MiB", "transient_bytes", ".1f", 2**20)),
    *(shown("of naive", "memory_of_naive", ".2f"), shown("of dense", "memory_of_dense", ".2f")),
    *(shown("peak MiB", "peak_bytes", ".1f", 2**20), *TIMES),
    *(shown("of naive", "time_of_naive", ".2f"), shown("of dense", "time_of_dense", ".2f"), *REST),
]


def titled(
    rows: Sequence[Any], title: Callable[[Any], str], line: Callable[[Any], Sequence[str]]
) -> Iterator[Sequence[str] | str]:
    """A line a row, every run of rows with one title under it, as `aligned` takes them."""
    for heading, found in groupby(rows, key=title):
        yield heading
        yield from map(line, found)


def text_of(
    report: BenchReport, head: str, columns: Sequence[Column], title: Callable[[Any], str], right: range
) -> str:
    """A table. `right`: columns of numbers."""
    lines = titled(report.rows, title, lambda row: [cell(row) for _, cell in columns])
    return aligned([head, [heading for heading, _ in columns], *lines], numbers=right)


def layers_text(report: BenchReport) -> str:
    """Of `blr bench layers`."""
    name = report.machine["name"]
    clock = "by the host's clock" if name == "cpu" else "without the host"
    head = f"{name}: milliseconds a call, {clock}"
    return text_of(report, head, LAYERS, lambda row: str(row.case), range(0))


def decode_text(report: BenchReport) -> str:
    """Of `blr bench decode`."""
    copied = report.machine.get("copy_tbps")
    head = f"{report.machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")
    title = "{0.model}, context {0.context}, batch {0.batch}, {0.dtype}".format
    return text_of(report, head, DECODE, title, range(1, 8))


def prefill_text(report: BenchReport) -> str:
    """Of `blr bench prefill`."""
    head = f"{report.machine.get('name')}: milliseconds to the first token"
    return text_of(report, head, PREFILL, "{0.model}, {0.batch} x {0.tokens} tokens".format, range(2, 7))


def memory_title(row: MemoryRow) -> str:
    """What the case of a row of `blr bench memory` is called."""
    return f"{row.model} at {row.keep:.0%}, {row.batch} x {row.length}, {row.dtype}"


def memory_text(report: BenchReport) -> str:
    """Of `blr bench memory`."""
    return text_of(report, str(report.machine.get("name")), MEMORY, memory_title, range(1, 6))
