"""What the scripts beside this file share: arms from plain functions, options, a table and JSON.

A script says what is timed, as cases of the harness of `blr bench`: arms are checked, those that are
right take turns, in CUDA graphs over copies that no cache holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from blr.compressor.base.device import pick_device
from blr.compressor.base.progress import Progress
from blr.compressor.bench.checks import Expected, find_precision
from blr.compressor.bench.harness import Arm, Case, Checked, Harness
from blr.compressor.bench.layer_problem import KernelTimer
from blr.compressor.bench.memory import transient_bytes
from blr.compressor.bench.results import (
    OK,
    BenchReport,
    Column,
    Timed,
    or_status,
    shown,
    text_of,
)
from blr.compressor.bench.timing import ARM_SECONDS, Call, Rotation, Sampler

Check = Callable[[dict[str, Any]], tuple[Sampler, float]]  # fills in what is told; sampler and error
Way = tuple[Call, tuple[Tensor, ...]]  # a function and its arguments, the input first


@dataclass
class ScriptRow(Timed):
    """One arm of a case. gain: how many times as fast as the first. told: what else is known of it."""

    case: str
    arm: str
    gain: float | None = None
    told: dict[str, Any] = field(default_factory=dict)


def compare(rows: Sequence[ScriptRow]) -> None:
    """Fill in the gains."""
    for row in rows:
        if row.ms is not None and rows[0].ms is not None:
            row.gain = rows[0].ms / row.ms


def said(row: ScriptRow) -> str:
    """The note, and what is told."""
    told = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.told.items())
    return ", ".join([*([row.note] if row.note else []), *told])


COLUMNS: list[Column] = [
    *(shown("arm", "arm"), or_status("us", "ms", ".2f", 1e-3)),
    ("quartiles", lambda r: "" if r.ms is None else f"{1e3 * r.low:.2f}–{1e3 * r.high:.2f}"),
    *(shown("x", "gain", ".2f"), shown("error", "rel_error", ".1e"), ("", said)),
]


def options(about: str | None, precision: str = "bfloat16") -> argparse.ArgumentParser:
    """Those of every script."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=kind)
    parser.add_argument("-o", "--output", type=Path, help="file for the results as JSON")
    parser.add_argument("--seconds", type=float, help="after which no case is started")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default=precision)
    return parser


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(word) for word in text.split(",")]


def timer_of(given: argparse.Namespace) -> KernelTimer:
    """For calls of kernels on the device and in the precision of the options."""
    return KernelTimer(pick_device(given.device), find_precision(given.dtype))


def kernel_case(
    timer: KernelTimer,
    title: str,
    make: Callable[[], tuple[Expected, dict[str, Way]]],
    limit: float | None = None,
    memory: bool = False,
) -> Case:
    """Ways to compute one thing, by name, made when their turn comes, and what it must be; in tables the
    others are compared with the first. memory: what a call allocates is told, too."""

    def arm(expected: Expected, name: str, call: Call, arguments: tuple[Tensor, ...]) -> Arm:
        row, rotation = ScriptRow(title, name), Rotation(arguments, timer.l2)

        def check() -> Checked:
            found = timer.checked(lambda: (call, rotation), expected, limit)
            if memory:
                row.told["MiB"] = transient_bytes(lambda: call(*arguments), timer.device) / 2**20
            return found

        return Arm(row, check)

    def arms() -> list[Arm]:
        expected, ways = make()
        return [arm(expected, name, *way) for name, way in ways.items()]

    return Case(title, arms, compare, timer.case)


def step_case(
    title: str,
    checks: dict[str, Callable[[dict[str, Any]], tuple[Sampler, float]]],
    limits: dict[str, float],
) -> Case:
    """Arms that time themselves, by name: a check fills in what is told, and gives sampler and error."""

    def arm(name: str) -> Arm:
        row = ScriptRow(title, name)
        return Arm(row, lambda: Checked(*checks[name](row.told), limits[name]))

    return Case(title, lambda: [arm(name) for name in checks], compare)


def run(
    given: argparse.Namespace,
    cases: list[Case],
    tell: Callable[[Sequence[ScriptRow]], str] | None = None,
) -> int:
    """Time all cases, print them, and write them; 1 if an arm is not right. `tell`: a last line."""
    settings = {name: str(value) for name, value in vars(given).items()}
    report = BenchReport(Path(sys.argv[0]).name, settings, ScriptRow)
    device = pick_device(given.device)
    harness = Harness(report, Progress(), device, given.rounds, given.seconds, ARM_SECONDS)
    code = harness.run(cases)
    print(text_of(report, report.machine["name"], COLUMNS, lambda row: str(row.case), range(0)))
    if tell is not None:
        print(tell(report.rows))
    if given.output is not None:
        given.output.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    if report.stopped:
        print(f"stopped: {report.stopped}", file=sys.stderr)
    return code or int(any(row.status != OK for row in report.rows))
