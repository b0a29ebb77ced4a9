"""How long the cases of a benchmark take on a CPU, told before they start: a 7B's layers take an hour
of one, which nobody expects who types the command as the README has it for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from blr.compressor.base.errors import UsageError
from blr.compressor.bench.precision import Precision, computing_in
from blr.compressor.bench.runner import Case

MOST = 120.0  # predicted seconds that are waited for without being asked to
CALLS = 8  # of an arm: the one that is checked, at least four that are timed, and what it must give
ARM_SECONDS = 0.05  # of the smallest arm: its numbers are drawn and its samples taken
SIDE, ROWS, TRIALS = 1024, 64, 3


def announce(cases: Sequence[Case], seconds: float | None) -> str:
    """What is going to be run and how long it takes, in words.

    Args:
        seconds: after which no case is started; None without limit.

    Raises UsageError for what takes minutes without such a limit.
    """
    found = predicted_seconds(cases)
    said = f"{len(cases)} cases on a CPU take about {_time(found)} (predicted)"
    if found > MOST and seconds is None:
        raise UsageError(
            f"{said}, expected at most {_time(MOST)} unless asked for; give less to time (smaller "
            "--models, fewer tokens or rows), a GPU, or --seconds N to start no case after N"
        )
    return said


def predicted_seconds(cases: Sequence[Case]) -> float:
    """From the arms of the cases, their operations, and the speed of this CPU at a small product."""
    precisions = {case.precision.name: case.precision for case in cases}
    rates = {name: _rate(precision) for name, precision in precisions.items()}
    return sum(ARM_SECONDS * c.count + CALLS * c.flops / rates[c.precision.name] for c in cases)


def _rate(precision: Precision) -> float:
    """Floating-point operations a second of [64, 1024] times [1024, 1024]."""
    x, w = (torch.ones(n, SIDE, dtype=precision.dtype) for n in (ROWS, SIDE))
    best = float("inf")
    with torch.no_grad(), computing_in(precision):
        for _ in range(TRIALS):
            started = perf_counter()
            x @ w.mT
            best = min(best, perf_counter() - started)
    return 2 * ROWS * SIDE**2 / max(best, 1e-9)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds <= MOST else f"{seconds / 60:.0f} minutes"
