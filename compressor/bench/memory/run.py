"""Runs the arms of `blr bench memory` in turn: results compared, memory, then times."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.memory.models import (
    Subject,
    dense_model,
    find_subject,
    low_rank_model,
    unfused,
)
from blr.compressor.bench.memory.predict import DENSE, FLASHSVD, NAIVE, OURS, WHOLE, predicted
from blr.compressor.bench.memory.track import transient_bytes
from blr.compressor.bench.results import OK, WRONG, MemoryRow, Report
from blr.compressor.bench.timing import spread
from blr.compressor.bench.whole import WholeModels, recorded
from blr.compressor.modeling.cuda_graphs import captured
from blr.compressor.modeling.masks import unmasked, unpacked
from blr.kernels.common.transient import DEFAULT, VARIABLE

# Relative error of our results against the same weights in float32, or so many times that of plain
# torch, which rounds every intermediate, too: attention among random weights makes more of it.
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
USUAL = 1.25
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryOptions:
    """What to measure.

    Attributes:
        models: of configs/bench-memory.yaml. keeps: shares of parameters of the replaced layers.
        arms: dense, naive (low rank by plain torch), whole (ours without a bound), ours, or ours-N for
            a bound of N MiB. pairs: (batch, length) of every case. per_head: q, k and v factorized
            head by head. padding: share of the longest length that a batch's shortest row is padded
            by. graphs: time passes as CUDA graphs.
    """

    models: Sequence[str]
    arms: Sequence[str] = (DENSE, NAIVE, WHOLE, OURS)
    keeps: Sequence[float] = (0.5, 0.75)
    pairs: Sequence[tuple[int, int]] = ((64, 512),)
    per_head: bool = False
    padding: float = 0.0
    rounds: int = 5
    device: str = "auto"
    dtype: str = "bfloat16"
    seconds: float | None = None
    graphs: bool = False


@dataclass
class MemoryBench(WholeModels):
    """One run."""

    options: MemoryOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        self.subjects = [find_subject(name) for name in self.options.models]
        for arm in self.options.arms:
            bound_of(arm)
        widths = [(subject.name, subject.width) for subject in self.subjects]
        if self.options.graphs and self.device.type != "cuda":
            raise CapabilityError("--graphs on the CPU: expected a CUDA GPU; leave it out here")
        self.refuse_large(widths, "measure --models pico-bert,pico-llama")

    def run_all(self) -> None:
        cases = [(s, keep) for s in self.subjects for keep in self.options.keeps]
        with self.progress.layers(len(cases) * len(self.options.pairs), "measuring") as starting:
            for subject, keep in cases:
                models = Arms(subject, keep, self.options.per_head, self.device, self.dtype)
                for batch, length in self.options.pairs:
                    title = f"{subject.name} at {keep:.0%}, {batch} x {length}"
                    if self.is_over(title):
                        return
                    starting(title)
                    self.report.rows += self._case(models, batch, length)
                del models
                self._release()

    def _case(self, models: Arms, batch: int, length: int) -> list[MemoryRow]:
        rows = {arm: self._row(models, arm, batch, length) for arm in self.options.arms}
        inputs = inputs_of(models.subject, batch, length, self.options.padding, self.device)
        expected: tuple[Tensor, float] | None = None
        for arm, row in rows.items():
            with recorded(row):
                found = self._measure(models, arm, row, inputs)
                if arm != DENSE:  # other weights
                    expected = expected or self._expected(models.get(NAIVE), inputs)
                    compare(row, found, *expected)
                del found
            self._release()
        del expected
        self._time(models, rows, inputs)
        ratios(list(rows.values()))
        return list(rows.values())

    def _row(self, models: Arms, arm: str, batch: int, length: int) -> MemoryRow:
        subject, keep = models.subject, models.keep
        row = MemoryRow(subject.name, keep, batch, length, self.options.dtype, arm)
        bound = int((bound_of(arm) or 0) * MIB)
        fixed = (batch, length, keep, self.dtype.itemsize, bound)
        row.predicted_bytes = predicted(subject, OURS if bound else arm, *fixed)
        row.flashsvd_bytes = predicted(subject, FLASHSVD, *fixed)
        return row

    def _expected(self, naive: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """The result in float32, and the relative error that is allowed."""
        with bounded(NAIVE):
            exact = exact_result(naive, inputs)
            usual = error_of(naive(**inputs).last_hidden_state, exact)
        self._release()
        return exact, max(LIMITS[self.dtype], USUAL * usual)

    def _measure(self, models: Arms, arm: str, row: MemoryRow, inputs: dict[str, Any]) -> Any:
        """Fill in the memory; the result [B, M, D]."""
        model = models.get(arm)
        row.weights_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        with bounded(arm):
            found = model(**inputs).last_hidden_state  # and libraries allocate what they keep
            row.transient_bytes = transient_bytes(lambda: model(**inputs), self.device)
        row.peak_bytes = row.weights_bytes + row.transient_bytes
        return found

    def _time(self, models: Arms, rows: dict[str, MemoryRow], inputs: dict[str, Any]) -> None:
        """Rounds in which every arm runs once, in turn."""
        runs: dict[str, Callable[[], Any]] = {}
        for arm, row in rows.items():
            with recorded(row), bounded(arm):
                if row.status == OK:
                    runs[arm] = self._run(models.get(arm), inputs)
        times: dict[str, list[float]] = {arm: [] for arm in runs}
        for _ in range(self.options.rounds):
            for arm, samples in times.items():
                with recorded(rows[arm]), bounded(arm):
                    samples.append(milliseconds(runs[arm], self.device))
        for arm, samples in times.items():
            if rows[arm].status == OK:
                rows[arm].fill(spread(samples))

    def _run(self, model: Any, inputs: dict[str, Any]) -> Callable[[], Any]:
        """A pass, or its graph, which holds what it takes until it is dropped."""
        run = partial(model, **inputs)
        if not self.options.graphs:
            return run
        with unpacked() if self.options.padding else unmasked():
            return captured(lambda: run().last_hidden_state)

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class Arms:
    """The models of one subject, made when asked for; those of low rank have the same weights."""

    subject: Subject
    keep: float
    per_head: bool
    device: torch.device
    dtype: torch.dtype
    built: dict[str, Any] = field(default_factory=dict)

    def get(self, arm: str) -> Any:
        """The model of an arm."""
        kind = arm if arm in (DENSE, NAIVE) else OURS
        if kind not in self.built:
            self.built[kind] = self._make(kind)
        return self.built[kind]

    def _make(self, kind: str) -> Any:
        place = (self.device, self.dtype)
        if kind == DENSE:
            return dense_model(self.subject, *place)
        if kind == NAIVE:
            return unfused(self.get(OURS))
        return low_rank_model(self.subject, self.keep, self.per_head, *place)


def bound_of(arm: str) -> float | None:
    """MiB of a bounded arm, None of the others. Raises UsageError for what is no arm."""
    if arm in (DENSE, NAIVE, WHOLE):
        return None
    name, _, number = arm.partition("-")
    if name == OURS and (not number or (number.isdecimal() and int(number))):
        return int(number or DEFAULT)
    raise UsageError(f"arm {arm!r}: expected dense, naive, whole, ours or ours-N for a bound of N MiB")


@contextmanager
def bounded(arm: str) -> Iterator[None]:
    """BLR_TRANSIENT as the arm has it."""
    before = os.environ.get(VARIABLE)
    bound = bound_of(arm)
    os.environ[VARIABLE] = "off" if bound is None else f"{bound:g}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def inputs_of(
    subject: Subject, batch: int, length: int, padding: float, device: torch.device
) -> dict[str, Any]:
    """Random tokens; with `padding`, rows are the shorter the later, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, subject.settings["vocab_size"], (batch, length), generator=generator)
    given: dict[str, Any] = {"input_ids": ids.to(device)}
    if subject.gated:
        given["use_cache"] = False
    if padding:
        kept = length - (torch.linspace(0, padding, batch) * length).long()
        given["attention_mask"] = (torch.arange(length) < kept[:, None]).long().to(device)
    return given


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one call: on a GPU between two events, else by the clock."""
    if device.type != "cuda":
        start = perf_counter()
        run()
        return (perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def exact_result(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The last hidden state [B, M, D] of `model` in float32, a sequence at a time."""
    made = copy.deepcopy(model).float()
    batch = len(inputs["input_ids"])
    rows = (
        {k: v[n : n + 1] if torch.is_tensor(v) else v for k, v in inputs.items()} for n in range(batch)
    )
    return torch.cat([made(**row).last_hidden_state for row in rows])


def error_of(found: Tensor, exact: Tensor) -> float:
    """Relative, of all numbers together."""
    return float((found.float() - exact).norm() / exact.norm())


def compare(row: MemoryRow, found: Tensor, exact: Tensor, limit: float) -> None:
    """Fill in the error; over `limit` the row is wrong."""
    row.rel_error = error_of(found, exact)
    if not row.rel_error <= limit:
        row.fail(WRONG, f"error {row.rel_error:.2g} against float32, expected {limit:.2g} at most")


def ratios(rows: list[MemoryRow]) -> None:
    """Fill in what the arms of one case are of the naive and of the dense one."""
    by_arm = {row.arm: row for row in rows if row.status == OK}
    for base in (NAIVE, DENSE):
        other = by_arm.get(base)
        for row in by_arm.values() if other is not None else ():
            assert other is not None
            setattr(row, f"memory_of_{base}", _ratio(row.transient_bytes, other.transient_bytes))
            setattr(row, f"time_of_{base}", _ratio(row.ms, other.ms))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def run_memory(options: MemoryOptions, progress: Progress) -> tuple[Report, int]:
    """Measure all that `options` name; the report, and the exit code.

    Raises UsageError or CapabilityError before anything is measured.
    """
    settings = {k: v for k, v in asdict(options).items() if v is not None}
    bench = MemoryBench(options, Report("bench memory", settings, kind=MemoryRow), progress)
    return bench.report, bench.run()
