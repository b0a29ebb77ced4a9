"""What tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import Compiled
from torch import Tensor

from blr.kernels.common import replay


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty is NaN: reading what was never written, or not writing, shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        real = tensor.is_floating_point() and not tensor.is_meta
        return tensor.fill_(float("nan")) if real else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """A driver that only notes; the CPU is the current GPU, Triton a release that replays ran with."""
    monkeypatch.setattr(replay, "_is_known", lambda: True)
    monkeypatch.setattr(replay, "_is_profiled", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # of the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return Compiled()
