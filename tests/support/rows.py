"""Rows of the checks on a GPU: one test makes many comparisons, each is told apart and counted."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One comparison. group: what is counted together, as structure and precision. `error` is
    relative, NaN where there is none to give; `limit` its bound."""

    group: str
    case: str
    passed: bool
    detail: str = ""
    error: float = math.nan
    limit: float = math.nan

    def __str__(self) -> str:
        measured = "" if math.isnan(self.limit) else f"error {self.error:.1e}, limit {self.limit:.1e}"
        told = ", ".join(part for part in (measured, self.detail) if part)
        return f"{'PASS' if self.passed else 'FAIL'} {self.group}: {self.case}: {told}".removesuffix(
            ": "
        )


def row(passed: bool, group: str, case: str, detail: str = "") -> Row:
    """A property that holds or not."""
    return Row(group, case, bool(passed), detail)


def bounded(group: str, case: str, error: float, limit: float, detail: str = "") -> Row:
    """An error that must not exceed `limit` (NaN does)."""
    return Row(group, case, error <= limit, detail, error, limit)


def attempt(group: str, case: str, limit: float, run: Callable[[], tuple[Tensor, Tensor]]) -> Row:
    """The distance of what `run` finds from what it expects; a failed row for what it raises, so
    that the comparisons after it are made. Errors of the device break the process: they pass."""
    try:
        return bounded(group, case, relative(*run()), limit)
    except Exception as error:
        if is_fatal(error):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).strip().splitlines() or [""])[0][:200]
        note = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {said}"
        return Row(group, case, False, note, math.nan, limit)


def is_fatal(error: BaseException) -> bool:
    """Whether the process cannot use its GPU any more."""
    return "CUDA error" in str(error) or "an illegal" in str(error)


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; NaN if shapes differ, infinite if anything found is no number."""
    if found.shape != expected.shape:
        return math.nan
    expected = expected.double()
    found = found.to(expected.device).double()
    if not bool(found.isfinite().all()):
        return math.inf
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def first_difference(found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> str:
    """Where two lists of continuations part, "" if they are the same."""
    if len(found) != len(wanted):
        return f"{len(found)} rows, expected {len(wanted)}"
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if list(ours) != list(theirs):
            pairs = zip(ours, theirs, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            return f"row {number} of {len(wanted)} differs at token {at} of {len(theirs)}"
    return ""


def tokens_row(
    group: str,
    case: str,
    found: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    detail: str = "",
) -> Row:
    """All continuations are the same."""
    why = first_difference(found, wanted)
    count = f"{sum(map(len, wanted))} tokens"
    return row(not why, group, case, ", ".join(part for part in (why or count, detail) if part))


def counted(rows: Iterable[Row], verdict: str) -> list[str]:
    """A line a group (how many passed, the worst error), and the count of all after `verdict`."""
    groups: dict[str, list[Row]] = {}
    for each in rows:
        groups.setdefault(each.group, []).append(each)
    lines = [_group_line(name, groups[name]) for name in sorted(groups)]
    every = [each for found in groups.values() for each in found]
    return [*lines, f"{verdict} {sum(each.passed for each in every)}/{len(every)}"]


def _group_line(name: str, rows: list[Row]) -> str:
    good = [each for each in rows if each.passed]
    line = f"{'PASS' if len(good) == len(rows) else 'FAIL'} {name}: {len(good)}/{len(rows)}"
    worst = max((r for r in good if r.error == r.error), key=lambda r: r.error, default=None)
    if worst is None:
        return line
    return f"{line}, worst {worst.error:.1e} of {worst.limit:.1e} at {worst.case}"


def packed(one: Row) -> tuple[str | bool | float, ...]:
    """What a report of pytest carries between processes; `Row(*packed(row))` is the row."""
    return astuple(one)
