"""What the host does for one call of a layer: where layers are small, the GPU waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from driver import Compiled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from blr.compressor.modeling import layers, stages
from blr.kernels.common import dispatch, launching, tables
from blr.kernels.layers.packed import launch, op

INLINED = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")  # by newer Pythons
SIZES = {"in_features": 128, "out_features": 128}
LAYERS: dict[str, dict[str, Any]] = {
    "low rank": {"structure": "svd", "rank": 32},
    "low rank in int4": {"structure": "svd", "rank": 64, "bits": 4, "group": 64},
    "blast": {"structure": "blast", "blocks": 4, "rank": 32},
    "blast of many blocks": {"structure": "blast", "blocks": 16, "rank": 32},
    "monarch": {"structure": "monarch", "blocks": 16, "block_rank": 16},
    "int4": {"structure": "dense", "bits": 4, "group": 64},
}
# Of one call: calls of functions of ours, operators of torch, launches. Fewer are welcome. Before these
# are raised, time the layer on a GPU: low rank of 4096 x 4096 took 30 us of the host (scripts/log).
MOST = {
    "low rank": (18, 2, 3),
    "low rank in int4": (79, 18, 5),
    "blast": (18, 2, 3),
    "blast of many blocks": (18, 10, 1),
    "monarch": (22, 6, 1),
    "int4": (35, 4, 2),
}


@pytest.fixture
def h200(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Tensors pass for those of an H200: its table chooses, and a driver notes the launches."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(tables, "gpu_key", lambda device: "h200")
    monkeypatch.setattr(launch, "has_wgmma", lambda device: True)
    monkeypatch.setattr(launching, "_compiled", {})
    for module in (dispatch, stages, op):
        monkeypatch.setattr(module, "kernel_device", lambda tensor: True)
    for kind in (InterpretedFunction, KernelInterface):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *given, **named: compiled)
    dispatch.forget()
    yield compiled
    dispatch.forget()


class Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(layer: nn.Module, x: torch.Tensor) -> list[str]:
    """Our functions that one call of `layer` calls, comprehensions aside."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        ours = str(frame.f_globals.get("__name__")).startswith("blr.")
        if event == "call" and ours and frame.f_code.co_name not in INLINED:
            found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.fast
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_asks_little_of_the_host(name: str, h200: Compiled) -> None:
    """From the third call on, when all that depends on shapes alone is known."""
    layer = layers.make_layer(LAYERS[name] | SIZES, bias=False).half()
    x = torch.zeros(2, 32, 128, dtype=torch.half)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        launched = len(h200.ran)
        made = calls(layer, x)
        launched = len(h200.ran) - launched
        with Operators() as operators:
            layer(x)
    found = len(made), operators.count, launched
    assert launched > 0, "the kernels of a GPU did not run"
    assert all(n <= most for n, most in zip(found, MOST[name], strict=True)), f"{found}: {made}"
