"""Rows of a benchmark, the report that holds them, and the files they are written to."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor import __version__
from blr.compressor.base.disk import fsync_folder, write_probe, write_stream
from blr.compressor.base.errors import OutputError
from blr.compressor.base.exhaustion import exhausted, storage_errors
from blr.compressor.base.quoting import named_line
from blr.compressor.workspace.ownership import check_outside

if TYPE_CHECKING:
    from blr.compressor.bench.timing import Spread

OK, WRONG, OOM, SKIPPED, FAILED = "ok", "wrong", "oom", "skipped", "failed"
JSON_NAME, CSV_NAME = "results.json", "results.csv"
PLOTS = ("roofline.png", "speedup.png", "wins.png", "decode.png", "memory.png")


class Timed:
    """What all rows have: the median of some samples and its quartiles, or why there is none."""

    status: str
    note: str | None
    ms: float | None
    low: float | None
    high: float | None
    rounds: int

    def fill(self, found: Spread) -> None:
        """Take what was timed."""
        self.ms, self.low, self.high, self.rounds = found.ms, found.low, found.high, found.rounds

    def fail(self, status: str, note: str) -> None:
        """Take back the time, if any, and say why."""
        self.status, self.note = status, note
        self.ms = self.low = self.high = None

    def record(self, error: Exception) -> None:
        """Take back the time for what an arm has raised."""
        if exhausted(error) is not None:
            self.fail(OOM, "out of memory")
        else:
            self.fail(FAILED, named_line(error))


@dataclass
class Row(Timed):
    """One arm at one shape.

    Attributes:
        case: rows of one case are compared: they have the same layer or pattern, n and dtype.
        arm: dense, dense-compile, dense-fp8, plain, compile, ours, fp8 or peer:NAME; for
            Kronecker-sparse patterns bmm, einsum, bsr, dense, ours or peer:NAME.
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


@dataclass
class DecodeRow(Timed):
    """One arm of `blr bench decode` at one model, context and batch.

    Attributes:
        status: ok, wrong (no time), oom or failed; `note` says why.
        tokens_per_second: of all rows of the batch together. ms, low, high: median and quartiles of
            `rounds` rounds of `steps` steps, milliseconds a step.
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
    status: str = OK
    note: str | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    steps: int = 0
    bytes: int | None = None
    floor_ms: float | None = None
    fraction: float | None = None
    rel_error: float | None = None
    equal_tokens: int | None = None

    def fail(self, status: str, note: str) -> None:
        """And the tokens a second."""
        super().fail(status, note)
        self.tokens_per_second = None


@dataclass
class MemoryRow(Timed):
    """One arm of `blr bench memory` at one model, batch and length.

    Attributes:
        keep: share of the parameters of the replaced layers. arm: dense, naive (low rank, unfused),
            ours, or ours-N for a bound of N MiB.
        transient_bytes: the most that a forward pass allocates beside what was there, its result
            included. peak_bytes: with the weights. predicted_bytes: by `bench/memory/predict.py`;
            flashsvd_bytes: what FlashSVD's theorems give.
        memory_of_naive, time_of_naive, memory_of_dense, time_of_dense: ratios to these arms.
        rel_error: of ours against naive.
    """

    model: str
    keep: float
    batch: int
    length: int
    dtype: str
    arm: str
    status: str = OK
    note: str | None = None
    transient_bytes: int | None = None
    peak_bytes: int | None = None
    weights_bytes: int | None = None
    predicted_bytes: int | None = None
    flashsvd_bytes: int | None = None
    memory_of_naive: float | None = None
    memory_of_dense: float | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    time_of_naive: float | None = None
    time_of_dense: float | None = None
    rel_error: float | None = None


@dataclass
class PrefillRow(Timed):
    """One arm of `blr bench prefill` at one model and number of tokens.

    Attributes:
        way: "" eager, "compiled", "graph" or "runtime". status: ok, wrong (no time), oom or failed;
            `note` says why.
        ms, low, high: to the first token, median and quartiles of `rounds` samples.
        of_dense, of_dense_fp8: times as fast as these arms, run in the same way (the runtime: as the
            faster of eager and compiled ones).
        rel_error: of logits, of float8 against its weights dequantized, of compiled against eager.
    """

    model: str
    arm: str
    way: str
    tokens: int
    batch: int
    status: str = OK
    note: str | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    of_dense: float | None = None
    of_dense_fp8: float | None = None
    rel_error: float | None = None


@dataclass
class Report:
    """Everything a run found out so far. `stopped`: why it ended early, if it did; `kind`: of `rows`."""

    command: str
    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    stopped: str | None = None
    seconds: float = 0.0
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    kind: type = Row

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
    for name in (JSON_NAME, CSV_NAME, *PLOTS):
        if os.path.lexists(folder / name):
            raise OutputError(f"output {folder}: already holds {name}; give another folder or remove it")


def save(report: Report, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json and results.csv. Raises OutputError or StorageError."""
    contents = {
        JSON_NAME: json.dumps(report.to_dict(summary), indent=1) + "\n",
        CSV_NAME: _csv(report),
    }
    with storage_errors(folder):
        for name, text in contents.items():
            write_stream(folder / name, [text.encode()], new=True)
        fsync_folder(folder)
    return [folder / name for name in contents]


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG, not over another file. Raises OutputError or StorageError."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    with storage_errors(path.parent):
        write_stream(path, [image.getvalue()], new=True)


def _csv(report: Report) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(report.kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in report.rows)
    return text.getvalue()
