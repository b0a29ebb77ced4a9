"""`compress --heal` in several processes: trained to the same up to rounding."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from limited import Limited
from ranks import SMALL, run_ranks
from safetensors.torch import load_file

# A training of four short steps, saved at each
STEPS = """
from dataclasses import replace
from blr.compressor.commands import compress_run as after
asked = after.options_of
short = {"minutes": None, "steps": 4, "window": 16, "batch": 64, "own_tokens": 400, "save_minutes": 0.0}
after.options_of = lambda settings: replace(asked(settings), **short)
"""
# The second process dies in training
DIE = """
import os, signal
from blr.compressor.healing.trainer import Trainer
backward = Trainer.backward
def dying(self):
    if os.environ.get("RANK") == "1" and self.state.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    backward(self)
Trainer.backward = dying
"""
CALIBRATED = ("--method", "svd", "--calibration", "TEXT", "--samples", "24", "--seq-len", "16")


def test_two_as_one_and_one_goes_on_where_two_stopped(
    limited: Limited, dense: Path, text: Path, tmp_path: Path
) -> None:
    options = [str(text) if option == "TEXT" else option for option in CALIBRATED]
    command = ("compress", dense, *options, "--heal", "1", "--device", "cpu", "-q", "--format", "json")
    patch = SMALL + STEPS
    alone = run_ranks(limited, 1, *command, "-o", "alone", cwd=tmp_path, patch=patch)
    assert alone.code == 0, alone.err
    killed = run_ranks(limited, 2, *command, "-o", "died", cwd=tmp_path, patch=patch + DIE)
    assert killed.code == 9 and not (tmp_path / "died").exists()
    assert "another process of this run is gone" in killed.err + killed.out
    for name, count in (("both", 2), ("died", 1)):
        done = run_ranks(limited, count, *command, "-o", name, cwd=tmp_path, patch=patch)
        assert done.code == 0, done.err[-2000:]
        assert json.loads(done.out)["healed"]["steps"] == 4
        found, expected = (load_file(tmp_path / n / "model.safetensors") for n in (name, "alone"))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-5, msg=key)
