"""Reports of benchmarks as text: a line an arm, a heading a case. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.bench.results import OK, MemoryRow, Report

Column = tuple[str, Callable[[Any], str]]  # its heading, and the cell of a row


def shown(heading: str, name: str, form: str = "", scale: float = 1) -> Column:
    """A column of an attribute, empty where that is None."""

    def cell(row: Any) -> str:
        value = getattr(row, name)
        return "" if value is None else f"{value if scale == 1 else value / scale:{form}}"

    return heading, cell


def or_status(heading: str, name: str, form: str) -> Column:
    """The same, with the status of an arm that is not right."""
    _, cell = shown(heading, name, form)
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
    report: Report, head: str, columns: Sequence[Column], title: Callable[[Any], str], right: range
) -> str:
    """A table. `right`: columns of numbers."""
    lines = titled(report.rows, title, lambda row: [cell(row) for _, cell in columns])
    return aligned([head, [heading for heading, _ in columns], *lines], numbers=right)


def layers_text(report: Report) -> str:
    """Of `blr bench layers`."""
    name = report.machine["name"]
    clock = "by the host's clock" if name == "cpu" else "without the host"
    head = f"{name}: milliseconds a call, {clock}"
    return text_of(report, head, LAYERS, lambda row: str(row.case), range(0))


def decode_text(report: Report) -> str:
    """Of `blr bench decode`."""
    copied = report.machine.get("copy_tbps")
    head = f"{report.machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")
    title = "{0.model}, context {0.context}, batch {0.batch}, {0.dtype}".format
    return text_of(report, head, DECODE, title, range(1, 8))


def prefill_text(report: Report) -> str:
    """Of `blr bench prefill`."""
    head = f"{report.machine.get('name')}: milliseconds to the first token"
    return text_of(report, head, PREFILL, "{0.model}, {0.batch} x {0.tokens} tokens".format, range(2, 7))


def memory_title(row: MemoryRow) -> str:
    """What the case of a row of `blr bench memory` is called."""
    return f"{row.model} at {row.keep:.0%}, {row.batch} x {row.length}, {row.dtype}"


def memory_text(report: Report) -> str:
    """Of `blr bench memory`."""
    return text_of(report, str(report.machine.get("name")), MEMORY, memory_title, range(1, 6))
