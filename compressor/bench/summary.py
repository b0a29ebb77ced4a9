"""What a report says in a few numbers, and as a table. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.bench.results import OK, DecodeRow, PrefillRow, Report, Row

LAYER_HEAD = (
    *("structure", "rank", "arm", "variant", "ms", "quartiles"),
    *("x dense", "floor", "of it", "error"),
)
DECODE_HEAD = ("arm", "tokens/s", "x base", "ms/step", "floor", "of it", "GB/step", "error", "")
PREFILL_HEAD = ("arm", "", "ms", "quartiles", "x dense", "x dense fp8", "error", "")
PATTERN_ARMS = ("ours", "bmm", "einsum", "bsr", "dense")


def cases(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of each case together, in the order they were timed."""
    return [list(found) for _, found in groupby(rows, key=lambda row: (row.case, row.dtype))]


def statuses(rows: Sequence[Row | DecodeRow | PrefillRow]) -> dict[str, int]:
    """How many rows have each status."""
    return {status: sum(r.status == status for r in rows) for status in sorted({r.status for r in rows})}


# --- layers -----------------------------------------------------------------------------------


def layers_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over layers: of the speedup over dense by structure, arm and n, and of the time of
    every other arm over that of ours on the same structure."""
    speedups: dict[str, Any] = {}
    for row in rows:
        if row.speedup is not None and row.structure != "dense":
            by_n = speedups.setdefault(row.structure, {}).setdefault(row.arm, {})
            by_n.setdefault(str(row.n), []).append(row.speedup)
    over: dict[str, Any] = {}
    for case in cases(rows):
        for ours, ms in ((r, r.ms) for r in case if r.arm == "ours" and r.ms is not None):
            for other in case:
                if _same_layer(ours, other) and other is not ours and other.ms is not None:
                    by_arm = over.setdefault(ours.structure, {})
                    by_arm.setdefault(other.arm, []).append(other.ms / ms)
    return {"speedup_over_dense": speedups_medians(speedups), "ours_over": medians(over)} | {
        "statuses": statuses(rows)
    }


def _same_layer(one: Row, other: Row) -> bool:
    return (one.structure, one.spec) == (other.structure, other.spec)


def medians(nested: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Lists two levels down replaced by their medians."""
    return {k: {name: round(median(v), 4) for name, v in found.items()} for k, found in nested.items()}


def speedups_medians(nested: dict[str, Any]) -> dict[str, Any]:
    """Lists three levels down replaced by their medians."""
    return {structure: medians(arms) for structure, arms in nested.items()}


# --- Kronecker-sparse patterns ----------------------------------------------------------------


def patterns_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For each precision the share of patterns where ours is the fastest of all arms, its median
    gain over the fastest other there and everywhere, and wins by h(b, c).

    Patterns where ours or every other arm has no time do not count.
    """
    found: dict[str, Any] = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        gains = [gain for case in cases(r for r in rows if r.dtype == dtype) if (gain := gain_of(case))]
        found[dtype] = _win_rate(gains)
    return {"by_dtype": found, "statuses": statuses(rows)}


def gain_of(case: Sequence[Row]) -> tuple[float, float] | None:
    """(h, time of the fastest other arm over ours) of one pattern."""
    timed = [(row, row.ms) for row in case if row.ms is not None]
    ours = [(row.h, ms) for row, ms in timed if row.arm == "ours" and row.h is not None]
    others = [ms for row, ms in timed if row.arm != "ours"]
    return (ours[0][0], min(others) / ours[0][1]) if ours and others else None


def _win_rate(gains: Sequence[tuple[float, float]]) -> dict[str, Any]:
    won = [gain for _, gain in gains if gain > 1]
    return {
        "patterns": len(gains),
        "ours_fastest": round(len(won) / len(gains), 4) if gains else None,
        "median_gain_where_fastest": round(median(won), 4) if won else None,
        "median_gain": round(median(g for _, g in gains), 4) if gains else None,
        "by_h": [[round(h, 5), wins, count] for h, wins, count in wins_by_h(gains)],
    }


def wins_by_h(gains: Sequence[tuple[float, float]]) -> list[tuple[float, int, int]]:
    """(h, patterns won, patterns) for each value of h, rising."""
    return [
        (h, sum(gain > 1 for at, gain in gains if at == h), sum(at == h for at, _ in gains))
        for h in sorted({h for h, _ in gains})
    ]


# --- decoding ---------------------------------------------------------------------------------


def decode_summary(rows: Sequence[DecodeRow]) -> dict[str, Any]:
    """Tokens a second by model, arm and "context x batch"."""
    speeds: dict[str, Any] = {}
    for row in rows:
        if row.tokens_per_second is not None:
            arms = speeds.setdefault(row.model, {}).setdefault(row.arm, {})
            arms[f"{row.context}x{row.batch}"] = round(row.tokens_per_second, 1)
    return {"tokens_per_second": speeds, "statuses": statuses(rows)}


def prefill_summary(rows: Sequence[PrefillRow]) -> dict[str, Any]:
    """Milliseconds to the first token by model, arm and tokens."""
    times: dict[str, Any] = {}
    for row in rows:
        if row.ms is not None:
            name = f"{row.arm} {row.way}".strip()
            times.setdefault(row.model, {}).setdefault(name, {})[row.tokens] = round(row.ms, 2)
    return {"first_token_ms": times, "statuses": statuses(rows)}


# --- text -------------------------------------------------------------------------------------


def titled(
    rows: Sequence[Any], title: Callable[[Any], str], line: Callable[[Any], Sequence[str]]
) -> Iterator[Sequence[str] | str]:
    """A line a row, every run of rows with one title under it, as `aligned` takes them."""
    for heading, found in groupby(rows, key=title):
        yield heading
        yield from map(line, found)


def layers_text(report: Report) -> str:
    """One line an arm, a heading a case."""
    lines: list[list[str] | str] = [[*LAYER_HEAD, *(["J"] if _energy(report) else []), ""]]
    for case in cases(report.rows):
        lines.append(case[0].case)
        lines += [_layer_line(row, _energy(report)) for row in case]
    return aligned([*_machine(report), *lines])


def _layer_line(row: Row, energy: bool) -> list[str]:
    time = _number(row.ms) if row.status == OK else row.status
    spread = "" if row.ms is None else f"{_number(row.low)}–{_number(row.high)}"
    cells = [row.structure, row.spec, row.arm, row.variant or "", time, spread, _number(row.speedup)]
    cells += [_number(row.floor_ms), _percent(row.fraction), _error(row.rel_error)]
    return [*cells, *([_number(row.joules)] if energy else []), row.note or ""]


def patterns_text(report: Report) -> str:
    """One line a pattern and precision: milliseconds of every arm, and the gain of ours."""
    names = list(dict.fromkeys([*PATTERN_ARMS, *(row.arm for row in report.rows)]))
    lines: list[list[str] | str] = [["pattern", "dtype", "h", "floor", *names, "gain", "variant"]]
    for case in cases(report.rows):
        by_arm = {row.arm: row for row in case}
        ours, gain = by_arm["ours"], gain_of(case)
        times = [_number(r.ms) if r.status == OK else r.status for r in map(by_arm.get, names) if r]
        head = [ours.spec, ours.dtype, f"{ours.h:.4f}", _number(ours.floor_ms)]
        lines.append([*head, *times, _number(gain[1]) if gain else "", ours.variant or ""])
    return aligned([*_machine(report), *lines])


def decode_text(report: Report) -> str:
    """One line an arm, a heading a model, context and batch."""
    copied = report.machine.get("copy_tbps")
    head = f"{report.machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")
    title = "{0.model}, context {0.context}, batch {0.batch}, {0.dtype}".format
    return aligned([head, DECODE_HEAD, *titled(report.rows, title, _decode_line)], numbers=range(1, 8))


def _decode_line(row: DecodeRow) -> list[str]:
    speed = f"{row.tokens_per_second:.1f}" if row.tokens_per_second else row.status
    gigabytes = None if row.bytes is None else row.bytes / 1e9
    cells = [row.arm, speed, *map(_number, (row.speedup, row.ms, row.floor_ms))]
    return [*cells, _percent(row.fraction), _number(gigabytes), _error(row.rel_error), row.note or ""]


def prefill_text(report: Report) -> str:
    """One line an arm, a heading a model and number of tokens."""
    head = f"{report.machine.get('name')}: milliseconds to the first token"
    title = "{0.model}, {0.batch} x {0.tokens} tokens".format
    return aligned([head, PREFILL_HEAD, *titled(report.rows, title, _prefill_line)], numbers=range(2, 7))


def _prefill_line(row: PrefillRow) -> list[str]:
    time = _number(row.ms) if row.status == OK else row.status
    spread = "" if row.ms is None else f"{_number(row.low)}–{_number(row.high)}"
    gains = map(_number, (row.of_dense, row.of_dense_fp8))
    return [row.arm, row.way, time, spread, *gains, _error(row.rel_error), row.note or ""]


def _machine(report: Report) -> list[str]:
    m = report.machine
    if m.get("ceilings") is None:
        return ["CPU run: milliseconds by the host's clock, no floors, no energy"]
    copied, ceilings = m["ceilings"]["copy_tbps"], m["ceilings"]["tflops"]
    rates = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in ceilings.items())
    return [f"{m['name']}: measured copy {copied:.2f} TB/s, {rates}; milliseconds a call"]


def _energy(report: Report) -> bool:
    return any(row.joules is not None for row in report.rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
