"""Takes the arms of one case through gate, timing and energy, and fills in their rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import torch

from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import named_line
from blr.compressor.bench.ceilings import Ceilings
from blr.compressor.bench.energy import EnergyMeter
from blr.compressor.bench.gate import Expected, WrongResult, check, poisoned
from blr.compressor.bench.precision import Precision, computing_in
from blr.compressor.bench.results import SKIPPED, WRONG, Report, Row
from blr.compressor.bench.timing import (
    Call,
    CpuSampler,
    CudaSampler,
    Rotation,
    Sampler,
    interleave,
    spread,
)
from blr.compressor.planning.roofline import Kernel

GRAPH_BELOW_MS = 2.0  # a longer call hides what its launches cost
RECOMPILATIONS = 256  # of one function by torch.compile, for as many shapes in one case


@dataclass
class Arm:
    """One implementation of one structure.

    Attributes:
        row: filled in by `Runner.run`.
        make: gives f(*arguments) and its arguments, the input first.
        expected: gives what the output must be.
        kernels: of its roofline.
        capture: may go into a CUDA graph.
        skip: why it is not run at all.
        limit: relative error that is right, None for that of the precision.
    """

    row: Row
    make: Callable[[], tuple[Call, Rotation]]
    expected: Callable[[], Expected]
    kernels: Sequence[Kernel]
    capture: bool = True
    skip: str | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Case:
    """Arms that are timed against each other; `arms` makes them, holding the data. About `count` of them
    take `flops` operations together, where that is known."""

    title: str
    precision: Precision
    arms: Callable[[], list[Arm]]
    count: int = 0
    flops: float = 0.0


@dataclass
class Runner:
    """What all cases of a run share.

    Attributes:
        rounds: samples an arm. deadline: `clock` time after which cases are not started.
        meter: energy, None if not asked for. ceilings: None on the CPU.
        compiling: some arms use torch.compile.
    """

    device: torch.device
    rounds: int
    ceilings: Ceilings | None = None
    meter: EnergyMeter | None = None
    compiling: bool = False
    deadline: float = float("inf")
    clock: Callable[[], float] = perf_counter
    l2: int = 0
    flush: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
            self.l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)

    def run_all(self, cases: Sequence[Case], report: Report, progress: Progress) -> None:
        """Run every case. Rows go to `report` case by case, so that an interrupted run keeps them."""
        with progress.layers(len(cases), "timing") as starting:
            for case in cases:
                if self.clock() > self.deadline:
                    report.stopped = f"the seconds were spent before {case.title}"
                    return
                starting(case.title)
                arms = case.arms()
                self.run(arms, case.precision)
                report.rows += [arm.row for arm in arms]
                del arms  # and with them the data
                self.release()

    def run(self, arms: Sequence[Arm], precision: Precision) -> None:
        """Time the arms of one case against each other; their rows tell what came of each."""
        if self.compiling:
            torch.compiler.reset()  # the functions are the same in all cases, the shapes are not
            torch._dynamo.config.recompile_limit = RECOMPILATIONS
        with torch.no_grad(), computing_in(precision), _quiet():
            pool = None if self.flush is None else torch.cuda.graph_pool_handle()
            samplers: dict[str, Sampler] = {}
            by_key = {str(n): arm for n, arm in enumerate(arms)}
            for key, arm in by_key.items():
                if (sampler := self._ready(arm, precision, pool)) is not None:
                    samplers[key] = sampler
            times = interleave(samplers, self.rounds, lambda key, e: _fail(by_key[key].row, e))
            for key, samples in times.items():
                self._fill(by_key[key], samplers[key], samples, precision)
        _speedups([arm.row for arm in arms])

    def release(self) -> None:
        """Give the memory of a finished case back."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a kernel that broke the context breaks this too
                torch.cuda.empty_cache()

    def _ready(self, arm: Arm, precision: Precision, pool: Any) -> Sampler | None:
        if arm.skip:
            arm.row.fail(SKIPPED, arm.skip)
            return None
        try:
            call, rotation = arm.make()
            y = poisoned(call, rotation.arguments)
            arm.row.rel_error = check(y, arm.expected(), arm.limit or precision.gate)
            del y
            return self._sampler(arm, call, rotation, precision, pool)
        except Exception as error:
            _fail(arm.row, error)
            self.release()
            return None

    def _sampler(
        self, arm: Arm, call: Call, rotation: Rotation, precision: Precision, pool: Any
    ) -> Sampler:
        if self.flush is None:
            return CpuSampler(call, rotation)
        if arm.capture and self._eager_ms(call, rotation) < GRAPH_BELOW_MS:
            try:
                return self._graph(arm, call, rotation, precision, pool)
            except (WrongResult, torch.OutOfMemoryError):
                raise
            except Exception as error:
                arm.row.note = f"no CUDA graph: {named_line(error)}"
                torch.cuda.synchronize()
        return CudaSampler(call, rotation, self.flush)

    def _graph(
        self, arm: Arm, call: Call, rotation: Rotation, precision: Precision, pool: Any
    ) -> CudaSampler:
        """A sampler of a graph whose replay, over an output filled with NaN, is right too."""
        sampler = CudaSampler(call, rotation, self.flush, pool)
        sampler.output.fill_(float("nan"))
        sampler.step()
        error = check(sampler.output, arm.expected(), arm.limit or precision.gate)
        arm.row.rel_error = max(error, arm.row.rel_error or 0.0)
        sampler.output = None
        return sampler

    def _eager_ms(self, call: Call, rotation: Rotation) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        call(*rotation.arguments)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _fill(self, arm: Arm, sampler: Sampler, samples: list[float], precision: Precision) -> None:
        row, found = arm.row, spread(samples)
        row.fill(found)
        if self.ceilings is not None:
            row.floor_ms = self.ceilings.floor_ms(arm.kernels, precision)
            row.fraction = row.floor_ms / found.ms
        if self.meter is not None:
            row.joules = self.meter.joules(sampler.step, sampler.calls, found.ms)


def _speedups(rows: list[Row]) -> None:
    """Fill in `speedup` from the row of the dense arm, if that has a time."""
    dense = next((row.ms for row in rows if row.arm == "dense"), None)
    for row in rows:
        if dense is not None and row.ms is not None:
            row.speedup = dense / row.ms


def _fail(row: Row, error: Exception) -> None:
    if isinstance(error, WrongResult):
        row.rel_error = error.error if isfinite(error.error) else None
        row.fail(WRONG, str(error))
    else:
        row.record(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice from torch about TF32 or beta layouts: both are meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
