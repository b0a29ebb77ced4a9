"""Models shared out over two processes (FSDP2) are healed as by one, and either resumes the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from limited import Limited, refused
from ranks import run_ranks
from safetensors.torch import load_file

OPTIONS = (
    *("--steps", "4", "--window", "16", "--batch", "80", "--own-tokens", "1000", "--lr", "0.01"),
    *("--device", "cpu", "--format", "json", "--quiet", "--no-check"),
)
# Ends the first process once it has saved two steps
DIE = """
import os
from blr.compressor.healing import trainer
save = trainer.Trainer._save
def saved(self):
    save(self)
    if self.state.step == 2: os._exit(77)
trainer.Trainer._save = saved
"""
# At most two windows a pass
NARROW = """
from blr.compressor.healing.trainer import Passes
init = Passes.__init__
def narrow(self, pair, objective, scored, most, micro, progress):
    init(self, pair, objective, scored, most, 2, progress)
Passes.__init__ = narrow
"""


@pytest.fixture(scope="module")
def command(compressed: Path, dense: Path) -> tuple[str, ...]:
    return ("heal", str(compressed), "--teacher", str(dense), *OPTIONS, "-o", "out")


@pytest.fixture(scope="module")
def alone(
    limited: Limited, command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """What one process says and makes."""
    folder = tmp_path_factory.mktemp("alone")
    done = limited.run(*command, cwd=folder)
    assert done.code == 0, done.err
    return json.loads(done.out), load_file(folder / "out" / "model.safetensors")


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_two_as_one(limited: Limited, command: tuple[str, ...], alone: tuple, tmp_path: Path) -> None:
    """Five windows a step: the second process has a pass less, and takes part in the first's."""
    summary, expected = alone
    done = run_ranks(limited, 2, *command, "--fsdp", cwd=tmp_path, patch=NARROW)
    assert done.code == 0, done.err[-2000:]
    told = json.loads(done.out)
    for name in ("steps", "tokens", "parameters", "best_step"):
        assert told[name] == summary[name], name
    assert_close(tmp_path, expected)


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_number_of_processes_goes_on(
    first: int, limited: Limited, command: tuple[str, ...], alone: tuple, tmp_path: Path
) -> None:
    often = (*command, "--save-minutes", "0")
    sharing = {1: (), 2: ("--fsdp",)}
    killed = run_ranks(limited, first, *often, *sharing[first], cwd=tmp_path, patch=DIE)
    assert killed.code == 77, killed.err
    second = 3 - first
    done = run_ranks(limited, second, *often, *sharing[second], cwd=tmp_path)
    assert done.code == 0, done.err[-2000:]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [1, 2, 3, 4]
    assert_close(tmp_path, alone[1])


def test_one_process_has_nobody_to_share_with(
    limited: Limited, command: tuple[str, ...], tmp_path: Path
) -> None:
    refused(limited.run(*command, "--fsdp", cwd=tmp_path), 2, "start several with --gpus N")


def test_where_all_that_is_trained_is_shared_out(
    limited: Limited, command: tuple[str, ...], tmp_path: Path
) -> None:
    """No gradient is left to sum."""
    done = run_ranks(limited, 2, *command, "--fsdp", "--train", "factors", cwd=tmp_path)
    assert done.code == 0, done.err[-2000:]
    assert json.loads(done.out)["best_step"] > 0
