"""How calls of single layers and kernels are checked and timed: float64, CUDA graphs, cold caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from blr.compressor.base.quoting import named_line
from blr.compressor.bench.checks import Expected, Precision, WrongResult, computing_in, poisoned, within
from blr.compressor.bench.harness import Checked
from blr.compressor.bench.timing import Call, CpuSampler, CudaSampler, Rotation

GRAPH_BELOW_MS = 2.0  # a longer call hides what its launches cost
RECOMPILATIONS = 256  # of one function by torch.compile, for as many shapes in one case
Maker = Callable[[], tuple[Call, Rotation]]  # gives f(*arguments) and its arguments


@dataclass
class KernelTimer:
    """Calls on one device in one precision. `compiling`: some arms use torch.compile."""

    device: torch.device
    precision: Precision
    compiling: bool = False
    l2: int = 0
    flush: Any = field(default=None, repr=False)
    pool: Any = None  # memory that the graphs of a case share

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)

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

    def checked(self, make: Maker, expected: Expected, limit: float | None = None) -> Checked:
        """A call run and compared. `limit`: relative error that is right, None for the precision's."""
        call, rotation = make()
        limit, note = limit or self.precision.gate, None
        error = within(expected.error(poisoned(call, rotation.arguments)), limit)
        if self.flush is None:
            return Checked(CpuSampler(call, rotation).sample, error, limit)
        if self._eager_ms(call, rotation) < GRAPH_BELOW_MS:
            try:
                return self._graph(call, rotation, expected, error, limit)
            except (WrongResult, torch.OutOfMemoryError):
                raise
            except Exception as failure:
                note = f"no CUDA graph: {named_line(failure)}"
                torch.cuda.synchronize()
        return Checked(CudaSampler(call, rotation, self.flush).sample, error, limit, note)

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
