"""Tests inside vLLM; collected in its environment only, which `scripts/check_vllm.sh` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is imported unless BLR_VLLM says that vLLM is there."""
    return None if os.environ.get("BLR_VLLM") else True
