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
from limited import Limited
from patience import PATIENCE
from ranks import run_ranks
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


# Ends the process after its fourth step is saved
DIE = """
import os, signal
from blr.compressor.healing import trainer
save = trainer.Trainer._save
def saved(self):
    save(self)
    if self.state.step == 4: os.kill(os.getpid(), signal.SIGKILL)
trainer.Trainer._save = saved
"""


def launch(folder: Path, launcher: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`blr` in two processes of their own."""
    if launcher == "--gpus":
        arguments = (*arguments, "--gpus", 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *LAUNCHERS[launcher], "-m", "blr.compressor", *map(str, arguments)]
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
def alone(
    limited: Limited,
    compressed: Path,
    dense: Path,
    text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """The command, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    command = ("heal", str(compressed), "--teacher", str(dense), "--data", str(text), *OPTIONS)
    done = limited.run(*command, "-o", "out", cwd=folder)
    assert done.code == 0, done.err
    return command, json.loads(done.out), load_file(folder / "out" / "model.safetensors")


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow  # forks are as one in the usual suite: `tests/parallel/test_healed.py`
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_as_one(launcher: str, alone: Any, tmp_path: Path) -> None:
    command, summary, expected = alone
    done = launch(tmp_path, launcher, *command, "-o", "out")
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
    done = launch(tmp_path, "torchrun", *command, "-o", "out")
    assert done.returncode != 0 and done.stderr.count("not empty") == 1


def test_two_go_on_where_one_stopped(alone: Any, limited: Limited, tmp_path: Path) -> None:
    """The number of processes is no setting of a run: each reads the state that was saved last."""
    command, _, expected = alone
    often = (*command, "-o", "out", "--save-minutes", "0")
    assert limited.run(*often, cwd=tmp_path, patch=DIE).code == -9
    done = run_ranks(limited, 2, *often, cwd=tmp_path, patch="")
    assert done.code == 0, done.err[-2000:]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [*range(1, 9)]
    assert_close(tmp_path, expected)
