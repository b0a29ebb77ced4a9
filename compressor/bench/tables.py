"""Reports of benchmarks as text: a line an arm, a heading a case. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.bench.results import OK, DecodeRow, LayerRow, MemoryRow, PrefillRow, Report, Timed

LAYER_HEAD = [*("structure", "rank", "arm", "variant", "ms", "quartiles"), *("x dense", "error", "")]
DECODE_HEAD = ["arm", "tokens/s", "x base", "ms/step", "floor", "of it", "GB/step", "error", ""]
PREFILL_HEAD = ["arm", "", "ms", "quartiles", "x dense", "x dense fp8", "error", ""]
MEMORY_HEAD = [
    *("arm", "transient MiB", "of naive", "of dense", "peak MiB"),
    *("ms", "quartiles", "of naive", "of dense", "error", ""),
]
MIB = 1 << 20


def titled(
    rows: Sequence[Any], title: Callable[[Any], str], line: Callable[[Any], Sequence[str]]
) -> Iterator[Sequence[str] | str]:
    """A line a row, every run of rows with one title under it, as `aligned` takes them."""
    for heading, found in groupby(rows, key=title):
        yield heading
        yield from map(line, found)


def layers_text(report: Report) -> str:
    """Of `blr bench layers`."""
    name = report.machine["name"]
    clock = "by the host's clock" if name == "cpu" else "without the host"
    head = f"{name}: milliseconds a call, {clock}"
    lines = titled(report.rows, lambda row: str(row.case), _layer_line)
    return aligned([head, LAYER_HEAD, *lines])


def _layer_line(row: LayerRow) -> list[str]:
    cells = [row.structure, row.spec, row.arm, row.variant or "", *_times(row)]
    return [*cells, _number(row.speedup), *_rest(row)]


def decode_text(report: Report) -> str:
    """Of `blr bench decode`."""
    copied = report.machine.get("copy_tbps")
    head = f"{report.machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")
    title = "{0.model}, context {0.context}, batch {0.batch}, {0.dtype}".format
    return aligned([head, DECODE_HEAD, *titled(report.rows, title, _decode_line)], numbers=range(1, 8))


def _decode_line(row: DecodeRow) -> list[str]:
    speed = f"{row.tokens_per_second:.1f}" if row.tokens_per_second else row.status
    gigabytes = None if row.bytes is None else row.bytes / 1e9
    cells = [row.arm, speed, *map(_number, (row.speedup, row.ms, row.floor_ms))]
    return [*cells, _percent(row.fraction), _number(gigabytes), *_rest(row)]


def prefill_text(report: Report) -> str:
    """Of `blr bench prefill`."""
    head = f"{report.machine.get('name')}: milliseconds to the first token"
    title = "{0.model}, {0.batch} x {0.tokens} tokens".format
    return aligned([head, PREFILL_HEAD, *titled(report.rows, title, _prefill_line)], numbers=range(2, 7))


def _prefill_line(row: PrefillRow) -> list[str]:
    gains = map(_number, (row.of_dense, row.of_dense_fp8))
    return [row.arm, row.way, *_times(row), *gains, *_rest(row)]


def memory_title(row: MemoryRow) -> str:
    """What the case of a row of `blr bench memory` is called."""
    return f"{row.model} at {row.keep:.0%}, {row.batch} x {row.length}, {row.dtype}"


def memory_text(report: Report) -> str:
    """Of `blr bench memory`."""
    lines = titled(report.rows, memory_title, _memory_line)
    return aligned([str(report.machine.get("name")), MEMORY_HEAD, *lines], numbers=range(1, 6))


def _memory_line(row: MemoryRow) -> list[str]:
    transient, peak = (
        "" if size is None else f"{size / MIB:.1f}" for size in (row.transient_bytes, row.peak_bytes)
    )
    memory = [transient, _ratio(row.memory_of_naive), _ratio(row.memory_of_dense), peak]
    times = [*_times(row), _ratio(row.time_of_naive), _ratio(row.time_of_dense)]
    return [row.arm, *memory, *times, *_rest(row)]


def _times(row: Timed) -> list[str]:
    """The median, or why there is none, and the quartiles."""
    spread = "" if row.ms is None else f"{_number(row.low)}–{_number(row.high)}"
    return [_number(row.ms) if row.status == OK else row.status, spread]


def _rest(row: Timed) -> list[str]:
    """The error and the note."""
    return ["" if row.rel_error is None else f"{row.rel_error:.1e}", row.note or ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
