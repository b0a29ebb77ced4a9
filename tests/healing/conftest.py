"""A dense pico model, its compressed version and a text, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from heal_models import compress_pico, save_dense, write_text


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture(scope="session")
def compressed(dense: Path) -> Path:
    return compress_pico(dense, dense.parent / "compressed")


@pytest.fixture(scope="session")
def text(dense: Path) -> Path:
    return write_text(dense.parent / "text.txt")
