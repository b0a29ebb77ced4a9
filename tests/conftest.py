"""Fixtures shared by all tests: the bundled checkpoint and the `blr` command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when they are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads only slow pico-sized linear algebra down

DATA = Path(__file__).parent / "data"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundled trained checkpoint."""
    return DATA / "tiny-llama"


@pytest.fixture(scope="session")
def sample() -> Path:
    """Text that the bundled checkpoint never saw."""
    return DATA / "sample.txt"


@pytest.fixture
def blr(tmp_path: Path) -> Run:
    """Runs the installed `blr` command in a temporary folder, its output captured."""
    command = Path(sys.executable).with_name("blr")

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(command), *map(str, arguments)],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300, **options},
        )

    return run
