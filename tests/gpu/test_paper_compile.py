"""What the compiler makes of the paper's kernels for A100 and H100.

No GPU is needed, but much time, and no tuned table picks these kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from recording import Recorder
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

PRODUCT, TRANSPOSED, FUSED = (
    "blr.kernels.gemm.triton",
    "blr.kernels.paper.transposed",
    "blr.kernels.paper.fused_mix",
)
SPILLS = 96  # bytes a thread: none with Triton 3.9, 80 (staged, sm_80) with 3.6
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may use, by compute capability


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["fused_mix", "transposed", "staged"])
def test_default_configuration_hardly_spills(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096→4096, b=16, r=992, bf16: registers suffice, loads are asynchronous, wgmma on sm_90."""
    variant: Callable[..., Tensor] = getattr(import_module(f"blr.kernels.paper.{name}"), name)
    monkeypatch.setattr(f"{FUSED}.shared_limit", lambda device: SHARED[capability])
    kernels = [(PRODUCT, "bmm_kernel"), (TRANSPOSED, "mix_kernel"), (FUSED, "fused_mix_kernel")]
    recorders = [Recorder(monkeypatch, module, kernel) for module, kernel in kernels]
    make = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")  # noqa: E731
    middle = {} if name == "staged" else {"S": make(16, 16, 992)}
    V = make(16, 992, 256).transpose(1, 2)  # as layers in kernel layout keep it
    variant(x=make(4096, 4096), U=make(16, 256, 992), V=V, bias=make(4096), **middle)
    assert sum(len(r.launches) for r in recorders) == (3 if name == "transposed" else 2)
    for recorder in recorders:
        for launch in range(len(recorder.launches)):
            made = recorder.compile(launch, capability)
            ptx = made["asm"]["ptx"]
            assert made["spills"] <= SPILLS
            assert made["shared"] <= SHARED[capability]
            assert "mma" in ptx  # tensor cores, in the mix as well
            if recorder.kernel != "mix_kernel":
                assert "cp.async" in ptx
                assert ("wgmma" in ptx) == (capability == 90)
