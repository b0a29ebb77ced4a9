"""`blr bench memory` as text and as the summary on the last line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.bench.results import OK, MemoryRow, Report
from blr.compressor.bench.summary import titled

HEAD = ["arm", "transient MiB", "of naive", "of dense", "predicted", "FlashSVD's", "peak MiB"]
TIMES = ["ms", "low–high", "of naive", "of dense", "error", ""]
MIB = 1 << 20


def memory_text(report: Report) -> str:
    """One line an arm, a heading a case."""
    head = [str(report.machine.get("name")), [*HEAD, *TIMES]]
    return aligned([*head, *titled(report.rows, _title, _line)], numbers=range(1, 7))


def memory_summary(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Ratios of our arms by case, and how many rows are not right."""
    ours = [row for row in rows if row.arm.startswith("ours") and row.status == OK]
    cases = {
        f"{_title(row)}, {row.arm}": {
            "memory_of_naive": _rounded(row.memory_of_naive),
            "memory_of_dense": _rounded(row.memory_of_dense),
            "time_of_naive": _rounded(row.time_of_naive),
            "time_of_dense": _rounded(row.time_of_dense),
        }
        for row in ours
    }
    return {"cases": cases, "not_ok": sum(row.status != OK for row in rows)}


def _title(row: MemoryRow) -> str:
    return f"{row.model} at {row.keep:.0%}, {row.batch} x {row.length}, {row.dtype}"


def _line(row: MemoryRow) -> list[str]:
    sizes = [row.transient_bytes, row.predicted_bytes, row.flashsvd_bytes, row.peak_bytes]
    transient, foreseen, theirs, peak = ("" if s is None else f"{s / MIB:.1f}" for s in sizes)
    memory = [
        transient,
        _ratio(row.memory_of_naive),
        _ratio(row.memory_of_dense),
        foreseen,
        theirs,
        peak,
    ]
    time = f"{row.ms:.3f}" if row.ms is not None else row.status
    between = "" if row.low is None else f"{row.low:.3f}–{row.high:.3f}"
    error = "" if row.rel_error is None else f"{row.rel_error:.1e}"
    times = [time, between, _ratio(row.time_of_naive), _ratio(row.time_of_dense), error]
    return [row.arm, *memory, *times, row.note or ""]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
