"""`scripts/batch_compress.sh`: goes past failures, keeps what is there, resumes, ends with a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from pico import save_pico

SCRIPT = Path(__file__).parents[2] / "scripts" / "batch_compress.sh"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("batch") / "small")


def batch(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        **{"cwd": folder, "capture_output": True, "text": True, "timeout": PATIENCE},
        env={**os.environ, **variables, "PATH": path},
    )


@pytest.mark.slow
def test_failures_are_noted_and_the_rest_is_done(dense: Path, tmp_path: Path) -> None:
    asked = (tmp_path / "out", f"{dense} {tmp_path}/none", "svd", "1.5", "--no-check", "-q")
    done = batch(tmp_path, *asked)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert (done.returncode, len(rows)) == (1, 3), done.stderr
    assert rows["none-svd-cf1.5"] == ["failed", "(4)"] and rows["small-svd-cf1.5"][0] == "done"
    assert "none-svd-cf1.5 failed (code 4)" in done.stderr and "no such folder" in done.stderr
    kept = (tmp_path / "out" / "small-svd-cf1.5" / "model.safetensors").stat()
    (tmp_path / "none").symlink_to(dense)  # what failed for want of a model
    again = batch(tmp_path, *asked)
    assert again.returncode == 0 and again.stdout.count(" done ") == 2, again.stderr
    after = (tmp_path / "out" / "small-svd-cf1.5" / "model.safetensors").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.slow
def test_one_of_an_array_and_the_table(dense: Path, tmp_path: Path) -> None:
    asked = (tmp_path / "out", dense, "svd monarch", "1.5 2", "--no-check", "-q")
    assert batch(tmp_path, *asked, BLR_COUNT="1").stdout.strip() == "4"
    done = batch(tmp_path, *asked, BLR_ONLY="2")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    states = [line.split()[1] for line in batch(tmp_path, *asked, BLR_TABLE="1").stdout.splitlines()]
    assert states == ["state", "missing", "missing", "done", "missing"]
    assert batch(tmp_path).returncode == 2
