"""Arms × cases: every arm is checked, those that are right take turns, a row says what came of each.

A *case* is one question, such as one layer at one number of tokens; its *arms* are ways to compute the
same thing. All of `blr bench` and `blr tune` is cases for this harness. There is no time of an arm whose
result was not found right, and none of arms that did not run in turn.
"""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from blr.bench.checks import within
from blr.bench.results import BenchReport, Timed
from blr.bench.timing import Sampler, interleave, spread
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Checked:
    """An arm that can be timed.

    Attributes:
        error: of its result, relative, right up to `limit`; None for what the others are compared with.
        note: what else is to be said of it.
    """

    sampler: Sampler
    error: float | None
    limit: float = 0.0
    note: str | None = None


@dataclass
class Arm:
    """One way to compute what its case asks for.

    Attributes:
        row: what came of it. check: runs it once and says how far its result is off; what it raises
            becomes the row's status.
    """

    row: Timed
    check: Callable[[], Checked]


@dataclass
class Case:
    """Arms that are timed against each other.

    Attributes:
        arms: makes them, and holds their data. finish: fills in what rows say of each other. around: is
            entered before the first check and left after the last sample. together: how many of the
            first of some arms fit into memory at once. parts: whether a case that a signal ends counts
            with the arms that are timed by then.
    """

    title: str
    arms: Callable[[], Sequence[Arm]]
    finish: Callable[[Sequence[Any]], None] = lambda rows: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    together: Callable[[Sequence[Arm]], int] = len
    parts: bool = True

    @classmethod
    def of_rows(
        cls, title: str, rows: Sequence[Any], check: Callable[[Any], Checked], **more: Any
    ) -> Case:
        """A case with an arm a row, which `check` takes."""
        arms = [Arm(row, partial(check, row)) for row in rows]
        return cls(title, lambda: arms, **more)


@dataclass
class Harness:
    """One run.

    Attributes:
        report: has the rows of finished cases. rounds: samples of each arm. seconds: after which no case
            is started. arm_seconds: after which an arm gets no more than `timing.MIN_ROUNDS` samples.
    """

    report: BenchReport
    progress: Progress
    device: torch.device
    rounds: int
    seconds: float | None = None
    arm_seconds: float = inf
    clock: Callable[[], float] = perf_counter
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
        self.report.machine |= describe(self.device)

    def run(self, cases: list[Case]) -> int:
        """Run all cases and take them off the list, so that their models are freed one after the other.
        Returns 0, or 128 + N if signal N ended the run early."""
        try:
            with stoppable(), self.progress.layers(len(cases), "timing") as starting:
                while cases:
                    case = cases.pop(0)
                    if self.is_over():
                        self.report.stopped = f"the seconds were spent before {case.title}"
                        break
                    starting(case.title)
                    self.report.rows += self.run_case(case)
        except Stopped as stop:
            self.report.stopped = stop.name
            return 128 + stop.number
        finally:
            self.report.seconds = self.clock() - self.begun
        return 0

    def is_over(self) -> bool:
        """Whether the seconds are spent."""
        return self.seconds is not None and self.clock() - self.begun >= self.seconds

    def run_case(self, case: Case) -> list[Any]:
        """The rows of one case, in the order of its arms."""
        with torch.no_grad(), case.around():
            arms = list(case.arms())
            rows = [arm.row for arm in arms]
            try:
                while arms:
                    count = case.together(arms)
                    self._time(dict(enumerate(arms[:count])), case.parts)
                    del arms[:count]
                    self.release()
            except Stopped:
                if case.parts:
                    timed = [row for row in rows if row.ms is not None]
                    case.finish(timed)
                    self.report.rows += timed
                raise
        case.finish(rows)
        return rows

    def release(self) -> None:
        """Give the memory of finished arms back."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a kernel that broke the context breaks this too
                torch.cuda.empty_cache()

    def _time(self, arms: dict[int, Arm], parts: bool) -> None:
        """Check and time arms. A signal while they are checked leaves those that are ready one round."""
        samplers, stopped, rounds = dict[int, Sampler](), None, self.rounds
        try:
            for key, arm in arms.items():
                if (sampler := self._ready(arm)) is not None:
                    samplers[key] = sampler
        except Stopped as stop:
            stopped, rounds = stop, int(parts)
        failed = lambda key, error: arms[key].row.record(error)  # noqa: E731
        times: dict[int, list[float]] = {}
        try:
            interleave(samplers, rounds, failed, self.arm_seconds, times=times)
        finally:
            for key, samples in times.items():
                if samples:
                    arms[key].row.fill(spread(samples))
        if stopped is not None:
            raise stopped

    def _ready(self, arm: Arm) -> Sampler | None:
        """The sampler of an arm whose result is right."""
        try:
            found = arm.check()
            arm.row.rel_error, arm.row.note = found.error, found.note
            if found.error is not None:
                within(found.error, found.limit)
        except UsageError:
            raise
        except Exception as error:
            arm.row.record(error)
            self.release()
            return None
        return found.sampler


def free_models(device: torch.device) -> None:
    """Give back the memory of models that nothing refers to, which takes a while."""
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()  # compiled steps hold their models' graphs
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, for the report."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


class Stopped(KeyboardInterrupt):
    """A stopping signal arrived; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def name(self) -> str:
        """As "SIGINT"."""
        return signal.Signals(self.number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """While active, SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread, the first two also
    where the process was started with them ignored. The second one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # else under nohup
    numbers = [number for number in SIGNALS if hangs_up or number is not signal.SIGHUP]
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)
