"""Two processes heal as one does, up to the rounding of sums, and either resumes the other's work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from safetensors.torch import load_file

OPTIONS = (
    *("--steps", "8", "--window", "16", "--batch", "64", "--own-tokens", "3000", "--lr", "0.01"),
    *("--device", "cpu", "--format", "json", "--quiet"),
)


LAUNCHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ),
    "--gpus": (),
}


def launch(
    processes: int, folder: Path, *arguments: object, launcher: str = "torchrun"
) -> subprocess.CompletedProcess[str]:
    """`blr` in one process or in two."""
    start = [sys.executable, *(LAUNCHERS[launcher] if processes > 1 else ()), "-m", "blr.compressor"]
    if launcher == "--gpus":
        arguments = (*arguments, "--gpus", processes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [*start, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(compressed: Path, dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    command = ("heal", compressed, "--teacher", dense, "--data", text, *OPTIONS)
    done = launch(1, folder, *command, "-o", "out")
    assert done.returncode == 0, done.stderr
    return command, json.loads(done.stdout), load_file(folder / "out" / "model.safetensors")


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(n, marks=pytest.mark.slow) for n in ("accelerate", "--gpus"))],
)
def test_two_as_one(launcher: str, alone: Any, tmp_path: Path) -> None:
    command, summary, expected = alone
    done = launch(2, tmp_path, *command, "-o", "out", launcher=launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)  # by the first process only
    assert told["steps"] == summary["steps"] and told["tokens"] == summary["tokens"]
    for name, merit in summary["after"].items():
        assert told["after"][name]["kl"] == pytest.approx(merit["kl"], rel=1e-3)
    assert_close(tmp_path, expected)


def test_a_failure_of_the_first_ends_all(alone: Any, tmp_path: Path) -> None:
    command, *_ = alone
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("")
    done = launch(2, tmp_path, *command, "-o", "out")
    assert done.returncode != 0 and done.stderr.count("not empty") == 1


def test_two_go_on_where_one_stopped(alone: Any, tmp_path: Path) -> None:
    """The number of processes is no setting of a run: each reads the state that was saved last."""
    command, _, expected = alone
    killed = "import os, signal\nfrom blr.compressor.heal import trainer\n" + (
        "save = trainer.Trainer._save\n"
        "def saved(self):\n    save(self)\n"
        "    if self.state.step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "trainer.Trainer._save = saved\n"
        "from blr.compressor.cli import main\nmain()\n"
    )
    arguments = [*map(str, command), "-o", "out", "--save-minutes", "0"]
    start = [sys.executable, "-c", killed, *arguments]
    assert subprocess.run(start, cwd=tmp_path, capture_output=True, check=False).returncode == -9
    done = launch(2, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [*range(1, 9)]
    assert_close(tmp_path, expected)
