"""What benchmarks of whole models share: the machine, the time that is left, an early end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from blr.compressor.base.device import float_dtype, pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.results import Report, Timed
from blr.compressor.bench.stopping import Stopped, stoppable

CPU_WIDTH = 512  # hidden size of the largest random model that a CPU is asked to run


@dataclass
class WholeModels(ABC):
    """One run; `report` has the rows so far. `options` have a `device`, a `dtype` and `seconds` after
    which no case is started."""

    options: Any
    report: Report
    progress: Progress
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.device = pick_device(self.options.device)
        self.dtype = float_dtype(self.options.dtype)

    def run(self) -> int:
        """Run all cases. Returns 0, or 128 + N if signal N ended the run early."""
        self.begun = perf_counter()
        try:
            with stoppable(), torch.no_grad():
                self.measure_machine()
                self.run_all()
        except Stopped as stop:
            self.report.stopped = stop.name
            return 128 + stop.number
        finally:
            self.report.seconds = perf_counter() - self.begun
        return 0

    @abstractmethod
    def run_all(self) -> None:
        """Fill in the rows, a case after the other, until `is_over` says so."""

    def measure_machine(self) -> None:
        """Note what it is."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else "cpu"
        self.report.machine = {"device": str(self.device), "name": name}

    def is_over(self, title: str) -> bool:
        """Whether the seconds are spent before the case `title`, which the report then says."""
        limit = self.options.seconds
        over = limit is not None and perf_counter() - self.begun > limit
        if over:
            self.report.stopped = f"the seconds were spent before {title}"
        return over

    def refuse_large(self, widths: Iterable[tuple[str, int]], instead: str) -> None:
        """Raise CapabilityError for the first model by name and hidden size that a CPU would take hours
        for; `instead` is what to do there."""
        large = [name for name, width in widths if width > CPU_WIDTH]
        if self.device.type == "cpu" and large:
            raise CapabilityError(
                f"{large[0]} on the CPU would take hours: expected a CUDA GPU; {instead} here"
            )


@contextmanager
def recorded(row: Timed) -> Iterator[None]:
    """What an arm raises becomes the status of its row; what was asked for wrongly ends the run."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        row.record(error)
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
