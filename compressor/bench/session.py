"""One run of a benchmark: machine, cases, what to do when it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.ceilings import measure_ceilings
from blr.compressor.bench.energy import EnergyMeter
from blr.compressor.bench.precision import Precision
from blr.compressor.bench.results import Report
from blr.compressor.bench.runner import Case, Runner
from blr.compressor.bench.stopping import Stopped, stoppable
from blr.compressor.bench.waiting import announce

DRIVER_FILE = Path("/proc/driver/nvidia/version")  # of the running kernel, on Linux


@dataclass(frozen=True)
class Options:
    """What every benchmark takes.

    Attributes:
        device: auto, cpu, cuda or cuda:N. repeats: samples of an arm.
        seconds: after which no case is started, None without limit.
        energy: measure joules. compiling: there are torch.compile arms; None: on a GPU.
    """

    device: str = "auto"
    repeats: int = 10
    seconds: float | None = None
    energy: bool = False
    compiling: bool | None = None

    def pick(self) -> torch.device:
        """The device. Raises CapabilityError or, for one that is neither CPU nor CUDA, UsageError."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        from blr.compressor.base.device import pick_device

        device = pick_device(self.device)
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"device {self.device!r} cannot be timed; use cpu or cuda")
        return device

    def compiles_on(self, device: torch.device) -> bool:
        """Whether there are torch.compile arms: by default where a compilation takes seconds."""
        return device.type == "cuda" if self.compiling is None else self.compiling


def run_session(
    report: Report,
    options: Options,
    precisions: Sequence[Precision],
    cases: Callable[[Runner], list[Case]],
    progress: Progress,
) -> int:
    """Run all cases and fill in `report`.

    Returns:
        0, or 128 + N if signal N ended the run early: `report` then has the rows so far.
    """
    started = perf_counter()
    try:
        with stoppable():
            device = options.pick()
            meter = EnergyMeter(device)
            runner = Runner(device, options.repeats, compiling=options.compiles_on(device))
            if options.seconds is not None:
                runner.deadline = started + options.seconds
            runner.meter = meter if options.energy and meter.available else None
            if options.energy and not meter.available:
                progress.notes(["no energy: it takes a GPU and the package nvidia-ml-py"])
            if device.type == "cuda":
                progress.stage("measuring ceilings")
                runner.ceilings = measure_ceilings(device, precisions)
            report.machine = describe(runner, meter)
            made = cases(runner)
            if device.type == "cpu":
                progress.say(announce(made, options.seconds))
            runner.run_all(made, report, progress)
    except Stopped as stop:
        report.stopped = stop.name
        return 128 + stop.number
    finally:
        report.seconds = perf_counter() - started
    return 0


def describe(runner: Runner, meter: EnergyMeter) -> dict[str, Any]:
    """The machine, for the report."""
    cuda = runner.device.type == "cuda"
    return {
        "device": str(runner.device),
        "name": torch.cuda.get_device_name(runner.device) if cuda else "cpu",
        "driver": (meter.driver or _driver()) if cuda else None,
        "l2_bytes": runner.l2 or None,
        "threads": torch.get_num_threads(),
        "ceilings": None if runner.ceilings is None else asdict(runner.ceilings),
    }


def _driver() -> str | None:
    """The version of the loaded NVIDIA driver where NVML is not installed."""
    try:
        words = DRIVER_FILE.read_text("utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)
