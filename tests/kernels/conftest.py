"""What tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty is NaN: reading what was never written, or not writing, shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        real = tensor.is_floating_point() and not tensor.is_meta
        return tensor.fill_(float("nan")) if real else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
