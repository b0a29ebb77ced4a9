"""How calls of single layers and kernels are checked and timed: float64, CUDA graphs, rooflines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.quoting import named_line
from blr.compressor.bench.checks import Expected, Precision, WrongResult, computing_in, poisoned
from blr.compressor.bench.harness import Checked
from blr.compressor.bench.results import Timed
from blr.compressor.bench.timing import Call, CpuSampler, CudaSampler, Rotation, spread
from blr.compressor.planning.roofline import Kernel

GRAPH_BELOW_MS = 2.0  # a longer call hides what its launches cost
RECOMPILATIONS = 256  # of one function by torch.compile, for as many shapes in one case
COPIED = 1 << 30  # bytes of the buffer that is copied
SIDES = (4096, 8192)  # of the square matrices that are multiplied: the faster counts
REPEATS = 7  # of a ceiling
Maker = Callable[[], tuple[Call, Rotation]]


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reaches: terabytes read and written a second, and teraflops in a precision."""

    copy_tbps: float
    tflops: float

    def floor_ms(self, kernels: Iterable[Kernel], element: int) -> float:
        """The roofline in milliseconds of kernels that run one after the other, launches excluded;
        `element`: bytes of a number."""
        moved = ((k.moved * element / self.copy_tbps, 2 * k.products / self.tflops) for k in kernels)
        return sum(max(times) for times in moved) * 1e-9


def measured_copy(device: torch.device) -> float:
    """Terabytes a second that a large copy on a CUDA device reads and writes."""
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _median(lambda: target.copy_(source), target) * 1e-9


def measured_ceilings(device: torch.device, precision: Precision) -> Ceilings:
    """Both ceilings of a CUDA device, medians of some repeats on random data."""
    rates = []
    for side in SIDES:
        left, right = (torch.randn(side, side, device=device).to(precision.dtype) for _ in range(2))
        with computing_in(precision):
            ms = _median(partial(torch.matmul, left, right), torch.empty_like(left))
        rates.append(2 * side**3 / ms * 1e-9)
    return Ceilings(measured_copy(device), max(rates))


def _median(call: Callable[[], Tensor], flush: Tensor) -> float:
    """Milliseconds; `flush` is overwritten before each repeat."""
    sampler = CudaSampler(call, Rotation((), 0), flush)
    return spread([sampler.sample() for _ in range(REPEATS)]).ms


@dataclass
class KernelTimer:
    """Calls on one device in one precision. `compiling`: some arms use torch.compile."""

    device: torch.device
    precision: Precision
    ceilings: Ceilings | None = None
    compiling: bool = False
    l2: int = 0
    flush: Any = field(default=None, repr=False)
    pool: Any = None  # memory that the graphs of a case share

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)

    def machine(self) -> dict[str, Any]:
        """What a report says of it."""
        ceilings = None if self.ceilings is None else asdict(self.ceilings)
        return {"l2_bytes": self.l2 or None, "ceilings": ceilings}

    @contextmanager
    def case(self) -> Iterator[None]:
        """Inside, the arms of one case are checked and timed; torch gives no advice about TF32 or beta
        layouts, for both are meant."""
        if self.compiling:
            torch.compiler.reset()  # the functions are the same in all cases, the shapes are not
            torch._dynamo.config.recompile_limit = RECOMPILATIONS
        self.pool = None if self.flush is None else torch.cuda.graph_pool_handle()
        with computing_in(self.precision), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        self.pool = None

    def floor_ms(self, kernels: Iterable[Kernel]) -> float | None:
        """The roofline of some kernels, where ceilings are known."""
        if self.ceilings is None:
            return None
        return self.ceilings.floor_ms(kernels, self.precision.dtype.itemsize)

    def checked(
        self,
        row: Timed,
        make: Maker,
        expected: Expected,
        limit: float | None = None,
        capture: bool = True,
    ) -> Checked:
        """What `make` gives, f(*arguments) and its arguments, run and compared.

        Args:
            row: takes a note where a call cannot be captured in a CUDA graph.
            limit: relative error that is right, None for that of the precision.
            capture: a graph may be tried.
        """
        call, rotation = make()
        limit = limit or self.precision.gate
        error = within(expected.error(poisoned(call, rotation.arguments)), limit)
        if self.flush is None:
            return Checked(CpuSampler(call, rotation).sample, error, limit)
        if capture and self._eager_ms(call, rotation) < GRAPH_BELOW_MS:
            try:
                return self._graph(call, rotation, expected, error, limit)
            except (WrongResult, torch.OutOfMemoryError):
                raise
            except Exception as failure:
                row.note = f"no CUDA graph: {named_line(failure)}"
                torch.cuda.synchronize()
        return Checked(CudaSampler(call, rotation, self.flush).sample, error, limit)

    def _graph(
        self, call: Call, rotation: Rotation, expected: Expected, error: float, limit: float
    ) -> Checked:
        """By a graph whose replay, over an output filled with NaN, is right too."""
        sampler = CudaSampler(call, rotation, self.flush, self.pool)
        sampler.output.fill_(float("nan"))
        sampler.step()
        error = max(error, within(expected.error(sampler.output), limit))
        sampler.output = None
        return Checked(sampler.sample, error, limit)

    def _eager_ms(self, call: Call, rotation: Rotation) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        begin.record()
        call(*rotation.arguments)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def within(error: float, limit: float) -> float:
    """The error. Raises WrongResult above `limit` and for NaN."""
    if not error <= limit:
        raise WrongResult(error)
    return error
