"""Every hostile checkpoint is refused with one line, quickly, with nothing written or run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostile
import pytest
from patience import PATIENCE
from producing import listing

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.shapes import check_against_config
from blr.compressor.checkpoint.source import open_source

pytestmark = pytest.mark.fast

SECONDS = 10  # of CPU, for one refusal


@pytest.fixture
def alarm() -> Iterator[None]:
    """Turns a hang, on a FIFO for instance, or a long computation into a failure."""

    def late(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    started = time.process_time()
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize("case", hostile.HOSTILE)
def test_refused(case: str, tmp_path: Path, alarm: None) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    entry = hostile.HOSTILE[case]
    entry.build(folder)
    before = listing(tmp_path)
    with pytest.raises(InputError) as error:
        source = open_source(folder, allow_pickle=entry.allow_pickle, scratch=tmp_path / "scratch")
        check_against_config(source, hostile.LLAMA_SHAPES)
    message = str(error.value)
    assert entry.fragment in message
    assert len(message) < 500
    assert message.isprintable()
    assert listing(tmp_path) == before
    assert not (tmp_path / "canary").exists()


def test_good_twin_is_accepted(tmp_path: Path) -> None:
    """What the hostile checkpoints are made from is good, so each fails for its own sake."""
    source = open_source(hostile.write(tmp_path))
    check_against_config(source, hostile.LLAMA_SHAPES)
    assert source.entries.keys() == hostile.PICO.keys()


def test_auto_map_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    hostile.auto_map(folder)
    source = open_source(folder)
    assert list(source.extras.carried) == ["tokenizer_config.json"]
    assert source.extras.left == ("evil.py", "sitecustomize.py", "tokenizer.py")
    assert not (tmp_path / "canary").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_refused_without_torch_within_a_gigabyte(tmp_path: Path) -> None:
    """All but the pickles again in one fresh process: no torch, and bounded memory."""
    cases = [case for case, entry in hostile.HOSTILE.items() if not entry.allow_pickle]
    for case in cases:
        (tmp_path / case / "checkpoint").mkdir(parents=True)
        hostile.HOSTILE[case].build(tmp_path / case / "checkpoint")
    script = """
import sys
import time
from pathlib import Path
from blr.compressor.checkpoint.source import open_source
from blr.compressor.base.errors import InputError
for folder in sys.argv[1:]:
    try:
        open_source(Path(folder))
    except InputError:
        continue
    assert "mismatch" in folder or "auto-map" in folder, folder
assert not {"torch", "transformers", "safetensors", "numpy"} & sys.modules.keys()
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
    folders = [str(tmp_path / case / "checkpoint") for case in cases]
    command = [sys.executable, "-I", "-c", script, *folders]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 2**20  # KiB
