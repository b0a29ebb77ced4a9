"""A warm process that runs commands in forks, a pico decoder of characters, and a text for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from heal_models import save_dense, write_text
from limited import Limited


@pytest.fixture(scope="session")
def warm() -> Iterator[Limited]:
    with Limited() as started:
        yield started


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense") / "dense", "llama")


@pytest.fixture(scope="session")
def text(dense: Path) -> Path:
    return write_text(dense.parent / "text.txt")
