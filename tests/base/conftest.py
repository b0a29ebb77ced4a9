"""A pico decoder of characters, and a text for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from heal_models import save_dense, write_text


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense") / "dense", "llama")


@pytest.fixture(scope="session")
def text(dense: Path) -> Path:
    return write_text(dense.parent / "text.txt")
