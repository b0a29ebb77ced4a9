"""Rows of scripts/feature_check.py: one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Row:
    """What was found: `verdict` is PASS, FAIL or SKIP (which needs something this machine lacks)."""

    verdict: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} {self.name}: {self.detail}".removesuffix(": ")


def row(good: bool, name: str, detail: str = "") -> Row:
    """A PASS or a FAIL."""
    return Row(PASS if good else FAIL, name, detail)


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
    name: str, found: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], detail: str = ""
) -> Row:
    """PASS if all continuations are the same."""
    why = first_difference(found, wanted)
    count = f"{sum(map(len, wanted))} tokens"
    return row(not why, name, ", ".join(part for part in (why or count, detail) if part))
