"""The path through CUDA graphs, on fakes of torch.cuda that record and replay Python calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blr.bench.checks import PRECISIONS, expect
from blr.bench.harness import Arm, Case, Harness
from blr.bench.layer_problem import KernelTimer, LayerRow
from blr.bench.results import BenchReport
from blr.bench.timing import Rotation
from blr.compressor.base.progress import Progress

pytestmark = pytest.mark.fast

FLOAT32 = PRECISIONS["float32"]
linear = torch.nn.functional.linear


class Device:
    """What the fakes share: the graph that records and what device time has passed, in ms."""

    def __init__(self) -> None:
        self.recording: list[Callable[[], object]] | None = None
        self.log: list[str] = []
        self.now = 0.0

    def launch(self, work: Callable[[], object], ms: float = 0.25) -> None:
        """Run a kernel, or record it."""
        if self.recording is not None:
            self.recording.append(lambda: self.launch(work, ms))
        self.now += ms
        work()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """torch.cuda with streams, events and graphs of `Device`."""
    shared = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = shared.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def __init__(self) -> None:
            self.kernels: list[Callable[[], object]] = []

        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            shared.log.append(f"capture in {pool}")
            shared.recording = self.kernels

        def capture_end(self) -> None:
            shared.recording = None

        def replay(self) -> None:
            shared.log.append("replay")
            for kernel in self.kernels:
                kernel()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        **{"Event": Event, "CUDAGraph": Graph, "Stream": lambda device: stream},
        **{"stream": lambda stream: nullcontext(), "current_stream": lambda: stream},
        **{"current_device": lambda: -1, "graph_pool_handle": lambda: "pool"},
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return shared


def run(call: Callable[[Tensor, Tensor], Tensor]) -> LayerRow:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    row = LayerRow("", "", "", "svd", "", 8, 5, 1.0, 3, "float32", "ours")
    timer = KernelTimer(torch.device("cpu"), FLOAT32, flush=torch.empty(8))
    expected = expect(linear, x, (w,))
    make = lambda: (call, Rotation((x, w), l2=128))  # noqa: E731
    arm = Arm(row, lambda: timer.checked(make, expected))
    harness = Harness(BenchReport("", {}), Progress(True), torch.device("cpu"), rounds=4)
    harness.run_case(Case("", lambda: [arm], around=timer.case))
    return row


def kernel(device: Device, ms: float = 0.25) -> Callable[[Tensor, Tensor], Tensor]:
    """A layer of one kernel that takes `ms`."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(len(x), len(w))
        device.launch(lambda: y.copy_(linear(x, w)), ms)
        return y

    return call


def test_short_calls_are_timed_in_a_graph(device: Device) -> None:
    row = run(kernel(device))
    assert (row.status, row.note, row.rounds) == ("ok", None, 4)
    assert row.ms == pytest.approx(0.25)
    assert device.log.count("capture in pool") == 1


def test_long_calls_are_timed_in_a_loop(device: Device) -> None:
    row = run(kernel(device, 5.0))
    assert row.ms == pytest.approx(5.0)
    assert device.log == []


def test_a_call_that_cannot_be_captured_is_timed_in_a_loop(device: Device) -> None:
    plain = kernel(device)

    def call(x: Tensor, w: Tensor) -> Tensor:
        if device.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(x, w)

    row = run(call)
    assert row.ms == pytest.approx(0.25)
    assert row.note.startswith("no CUDA graph: RuntimeError: operation not permitted")


def test_a_graph_that_leaves_out_work_is_wrong(device: Device) -> None:
    """Right when called, but the host does the work: a replay writes nothing."""
    row = run(lambda x, w: linear(x, w))
    assert (row.status, row.ms) == ("wrong", None)
    assert "replay" in device.log
