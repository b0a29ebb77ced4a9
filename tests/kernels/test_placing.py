"""Kernels are launched on the GPU of their tensors, whichever is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blr.kernels.common import placing
from blr.kernels.common.launching import launch, run_kernel
from blr.kernels.common.placing import on_gpu, on_gpu_of
from blr.kernels.common.replay import Launches

pytestmark = pytest.mark.fast
SECOND = torch.device("cuda", 1)


class Machine:
    """Two GPUs, the first of them current; tensors are taken to lie on the second."""

    def __init__(self) -> None:
        self.current, self.used = 0, list[int]()

    @contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        before, self.current = self.current, where.index
        yield
        self.current = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(placing, "has_several_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    for name, found in (("is_cuda", True), ("device", SECOND), ("get_device", lambda self: 1)):
        monkeypatch.setattr(Tensor, name, found, raising=False)
    return made


class Kernel:
    """Stands for one of Triton's: notes the GPU that it would have been launched on."""

    arg_names = ("x", "N")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.machine.used.append(self.machine.current)


def test_every_way_of_launching(machine: Machine) -> None:
    kernel, x = Kernel(machine), torch.ones(4)
    descriptor = SimpleNamespace(base=x, block_shape=[4])
    run_kernel(kernel, (1,), x, N=4)
    run_kernel(kernel, (1,), 3, (7, x), N=4)
    run_kernel(kernel, (1,), descriptor, N=4)
    launch(kernel, (1,), (x,), {"N": 4})
    assert machine.used == [1] * 4 and machine.current == 0
    run_kernel(kernel, (1,), 3, N=4)  # no tensors: nothing to go by
    assert machine.used[-1] == 0


def test_what_is_launched_again(machine: Machine) -> None:
    def run(x: Tensor, *rest: Any, bias: Any = None) -> Tensor:
        machine.used.append(machine.current)
        return x

    x = torch.ones(2, 4)
    made = Launches(run)
    made.tries = 0
    for _ in range(2):
        assert made(x, None) is not None
    assert machine.used == [1] * 2 and machine.current == 0


def test_where_there_is_nothing_to_change(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(torch.device("cpu")) is placing.HERE
    assert on_gpu(torch.device("cuda", 0)) is placing.HERE
    monkeypatch.setattr(placing, "has_several_gpus", lambda: False)
    assert on_gpu(SECOND) is placing.HERE is on_gpu_of([torch.ones(1)])
