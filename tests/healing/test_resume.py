"""A healing run that is killed goes on as if nothing had happened: the same parameters in the end."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from killer import Killer, Outcome
from limited import Limited
from producing import files
from safetensors.torch import load_file
from torch import Tensor

KILLED = -9
Command = tuple[object, ...]
OPTIONS = ("--quiet", "--steps", 6, "--window", 16, "--batch", 64, "--own-tokens", 400, "--lr", 0.01)


def test_killed_at_any_save_and_resumed(
    killer: Killer, compressed: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    command = ("heal", compressed, "--teacher", dense, "--data", text, *OPTIONS)
    whole, expected = unharmed(killer, command, tmp_path)
    stores = [n for n, event in enumerate(whole.events) if event == "store"]
    assert len(stores) >= 8, "own text, six states, the trained tensors"
    for number in (stores[1], stores[4], stores[-1], len(whole.events) - 3):
        check_resumed(killer, command, tmp_path, number, whole, expected)


def unharmed(killer: Killer, command: Command, folder: Path) -> tuple[Outcome, dict[str, Tensor]]:
    """A run that nothing ends, and the tensors that it leaves."""
    whole = killer.run(*command, "--save-minutes", 0, "-o", "whole", cwd=folder)
    assert whole.code == 0, whole.stderr
    return whole, load_file(folder / "whole" / "model.safetensors")


def check_resumed(
    killer: Killer, command: Command, folder: Path, number: int, whole: Outcome,
    expected: dict[str, Tensor],
) -> None:  # fmt: skip
    """Killed at boundary `number` and run again, the command leaves the `expected` tensors."""
    name = f"out{number}"
    arguments = (*command, "--save-minutes", 0, "-o", name)
    assert killer.run(*arguments, cwd=folder, die_at=number).code == KILLED
    assert not (folder / name).exists()
    again = killer.run(*arguments, cwd=folder)
    assert again.code == 0, again.stderr
    found = load_file(folder / name / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert len(again.events) < len(whole.events), "it began anew"


def test_a_full_disk_is_told_and_what_was_saved_stays(
    killer: Killer, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    command = ("heal", compressed, "--teacher", dense, *OPTIONS, "--save-minutes", 0, "-o", "out")
    full = killer.run(*command, cwd=tmp_path, file_limit=30_000, blind=True)
    assert full.code == 6 and "file too large" in full.stderr
    assert killer.run(*command, cwd=tmp_path).code == 0


# Sends itself a signal in its 105th step, and another one if it is told to
SIGNALLED = """
import os, signal, time
from blr.compressor.base import stopping
from blr.compressor.healing import trainer
backward = trainer.Trainer.backward
def signalled(self):
    backward(self)
    if self.state.step == 104:
        os.kill(os.getpid(), signal.{name})
        while not stopping.waiting():
            time.sleep(0.01)
        while {twice}:
            os.kill(os.getpid(), signal.{name})
            time.sleep(0.2)
trainer.Trainer.backward = signalled
"""
# Fails unless the run goes on behind that step
RESUMED = """
from blr.compressor.healing import trainer
backward = trainer.Trainer.backward
def resumed(self):
    assert self.state.step >= 105
    return backward(self)
trainer.Trainer.backward = resumed
"""
LONG = ("--steps", "220", "--window", "8", "--batch", "16", "--mix", "0", "--device", "cpu", "--quiet")


def test_a_stop_saves_the_step_and_its_command_gives_the_same_files(
    limited: Limited, compressed: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Two steps make a line of metrics.jsonl, so the stop falls between two lines."""
    command = ("heal", str(compressed), "--teacher", str(dense), "--data", str(text), *LONG, "-o")
    assert limited.run(*command, "whole", cwd=tmp_path).code == 0
    for name, code in (("SIGINT", 130), ("SIGTERM", 143)):
        patch = SIGNALLED.format(name=name, twice=False)
        stopped = limited.run(*command, name, cwd=tmp_path, patch=patch)
        assert stopped.code == code, stopped.err
        noted, told = stopped.err.splitlines()[-2:]
        assert "a second signal stops at once" in noted
        partial = tmp_path / f"{name}.blr-partial"
        said, _, again = told.partition("; resume with: blr ")
        assert said == f"blr: stopped by {name}; what was saved so far is kept in {partial}"
        resumed = limited.run(*shlex.split(again), cwd=tmp_path, patch=RESUMED)
        assert resumed.code == 0, resumed.err
        assert files(tmp_path / name) == files(tmp_path / "whole")


def test_a_second_signal_does_not_wait(
    limited: Limited, compressed: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Unless it comes with the first, as under torchrun, which passes on what all processes got."""
    command = ("heal", str(compressed), "--teacher", str(dense), "--data", str(text), *LONG, "-o", "out")
    patch = SIGNALLED.format(name="SIGINT", twice=True)
    stopped = limited.run(*command, cwd=tmp_path, patch=patch)
    assert stopped.code == 130 and "stopped by SIGINT; " in stopped.err
