"""Tests with MLX and llama.cpp; collected in their environment only (`scripts/check_engines.sh`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is imported unless BLR_ENGINES says that they are there."""
    return None if os.environ.get("BLR_ENGINES") else True
