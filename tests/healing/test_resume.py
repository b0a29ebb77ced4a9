"""A healing run that is killed goes on as if nothing had happened: the same parameters in the end."""

from __future__ import annotations

from pathlib import Path

import torch
from killer import Killer, Outcome
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
