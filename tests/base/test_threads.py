"""Threads: no more than there are cores for this process, and none that spins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exporting import compress_to
from patience import PATIENCE
from typer.testing import CliRunner

from blr.compressor.base import threads
from blr.compressor.base.threads import available_cores, on_one_thread, use_threads
from blr.compressor.cli import app

V1, V2, PERIOD = "cpu.cfs_quota_us", "cpu.max", "cpu.cfs_period_us"
TREES: dict[str, tuple[int, str, dict[str, str], int]] = {
    # CPUs allowed, /proc/self/cgroup, files under /sys/fs/cgroup, cores expected
    "nothing known": (6, "", {}, 6),
    "v2 unlimited": (6, "0::/", {V2: "max 100000"}, 6),
    "v2 container": (6, "0::/", {V2: "200000 100000"}, 2),
    "v2 half a core": (6, "0::/", {V2: "50000 100000"}, 1),
    "v2 three and a half": (6, "0::/", {V2: "350000 100000"}, 3),
    "v2 more than there is": (2, "0::/", {V2: "900000 100000"}, 2),
    "v2 slice": (6, "0::/user/job", {f"user/job/{V2}": "400000 100000"}, 4),
    "v2 parent's": (6, "0::/user/job", {f"user/{V2}": "300000 100000", f"user/job/{V2}": "max 1"}, 3),
    "v2 host's path": (6, "0::/kubepods/pod1", {V2: "200000 100000"}, 2),
    "v2 outside": (6, "0::/../..", {V2: "200000 100000"}, 2),
    "v2 damaged": (6, "0::/", {V2: "much"}, 6),
    "v2 no period": (6, "0::/", {V2: "100 0"}, 6),
    "damaged": (6, "0:\n4:cpu\n", {V2: "200000 100000"}, 6),
    "v1 unlimited": (6, "4:cpu:/", {f"cpu/{V1}": "-1", f"cpu/{PERIOD}": "100000"}, 6),
    "v1 container": (6, "4:cpu:/", {f"cpu/{V1}": "250000", f"cpu/{PERIOD}": "100000"}, 2),
    "v1 two controllers": (
        *(6, "9:memory:/\n4:cpu,cpuacct:/docker/1"),
        *({f"cpu,cpuacct/{V1}": "100000", f"cpu,cpuacct/{PERIOD}": "100000"}, 1),
    ),
    "v1 other controllers": (6, "4:cpuset:/\n5:cpuacct:/", {f"cpuset/{V1}": "100000"}, 6),
}


@pytest.mark.parametrize("name", TREES)
def test_cores_by_affinity_and_quota(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, groups, files, expected = TREES[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for file, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_cores(tmp_path) == expected


def test_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5}, raising=False)
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert available_cores(tmp_path) == 2


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("environment", "asked", "current", "cores", "expected"),
    [
        ({}, None, 4, 2, 2),
        ({}, None, 1, 2, 1),  # what a library's user has set already
        ({}, 3, 1, 2, 3),
        ({"OMP_NUM_THREADS": "4"}, None, 4, 2, 4),
        ({"OMP_NUM_THREADS": "4"}, 1, 4, 2, 1),
        ({"MKL_NUM_THREADS": "4,2"}, None, 4, 2, 4),
        ({"OMP_NUM_THREADS": "many"}, None, 4, 2, 2),
    ],
)
def test_who_decides(
    environment: dict[str, str],
    asked: int | None,
    current: int,
    cores: int,
    expected: int,
    restored: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in threads.COUNTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "available_cores", lambda: cores)
    torch.set_num_threads(current)
    assert use_threads(asked) == expected == torch.get_num_threads()


FRESH = """
import json, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from blr.compressor.base.threads import use_threads
number = use_threads(*map(int, sys.argv[1:]))
import torch
print(json.dumps([number, torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets an affinity mask")
@pytest.mark.parametrize(("asked", "expected"), [((), 1), (("2",), 2)])
def test_before_torch_is_imported(asked: tuple[str, ...], expected: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in threads.COUNTS}
    command = [sys.executable, "-c", FRESH, *asked]
    options = {"capture_output": True, "text": True, "check": True, "timeout": PATIENCE}
    done = subprocess.run(command, env=environment, **options)
    assert json.loads(done.stdout) == [expected, expected, "PASSIVE"]


def test_small_layers_have_the_same_bytes_whatever_the_number_of_threads(
    tiny: Path, tmp_path: Path, restored: None
) -> None:
    found = set[bytes]()
    for number in (1, 3):
        torch.set_num_threads(number)
        output = compress_to(tiny, tmp_path / f"{number}", method="blast", rounds=3)
        found.add((output / "model.safetensors").read_bytes())
        assert torch.get_num_threads() == number
    assert len(found) == 1


def test_an_error_on_one_of_several_threads_ends_the_others_and_is_told(restored: None) -> None:
    begun: list[str] = []

    def compute(item: str) -> None:
        begun.append(item)
        raise ValueError(f"{item} on {torch.get_num_threads()}")

    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="a on 1"):
        on_one_thread(["a", *map(str, range(1000))], compute)
    assert len(begun) < 1000
    assert torch.get_num_threads() == 2


COMMANDS = {
    "compress": ("{tiny}", "-o", "out", "--include", "*layers.0.mlp.down_proj", "--force"),
    "export": ("{tiny}", "-o", "out"),
    "eval": ("{tiny}", "--text", "{sample}", "--max-tokens", "64"),
    "generate": ("{tiny}", "The protocol", "--max-new-tokens", "1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_computes_takes_a_number(
    name: str,
    tiny: Path,
    sample: Path,
    tmp_path: Path,
    restored: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [part.format(tiny=tiny, sample=sample) for part in COMMANDS[name]]
    done = CliRunner().invoke(app, [name, *given, "--threads", "3"], catch_exceptions=False)
    assert (done.exit_code, torch.get_num_threads()) == (0, 3)
    if name == "compress":
        manifest = json.loads((tmp_path / "out" / "blr_manifest.json").read_text())
        assert manifest["run"]["threads"] == 3
