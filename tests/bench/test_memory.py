"""`blr bench memory` on a CPU: rows, ratios, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import Run

from blr.bench.memory import run_memory, transient_bytes
from blr.bench.options import MemoryOptions
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import Progress

SMALL = ("bench", "memory", "--pairs", "8x512", "--dtype", "float32", "--rounds", "1", "--keep", "0.5")


def test_arms_of_both_kinds(blr: Run, tmp_path: Path) -> None:
    done = blr(
        *(*SMALL, "--models", "pico-bert,pico-llama", "--arms", "dense,naive,whole,ours-1"),
        *("--format", "json", "--output", str(tmp_path / "out")),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["status"] for row in report["rows"]] == ["ok"] * 8, report["rows"]
    for dense, naive, whole, ours in (report["rows"][:4], report["rows"][4:]):
        assert ours["rel_error"] <= 1e-5 and dense["rel_error"] is None
        assert (
            ours["transient_bytes"]
            < 0.65 * naive["transient_bytes"]
            <= 0.65 * 1.1 * dense["transient_bytes"]
        )
        assert ours["memory_of_naive"] == ours["transient_bytes"] / naive["transient_bytes"]
        assert ours["peak_bytes"] == ours["transient_bytes"] + ours["weights_bytes"]
        assert whole["rel_error"] <= 1e-5 and whole["transient_bytes"] <= naive["transient_bytes"]
        for row in (dense, naive, whole, ours):
            assert row["ms"] > 0
    assert report["summary"]["not_ok"] == 0 and len(report["summary"]["cases"]) == 2


def test_graphs_want_a_gpu() -> None:
    with pytest.raises(CapabilityError, match="--graphs on the CPU"):
        run_memory(MemoryOptions(models=["pico-bert"], graphs=True, device="cpu"), Progress(quiet=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "bert-large"], "'bert-large' is not known; expected one of bert-base"),
        (["--arms", "ours-x"], "arm 'ours-x': expected dense, naive, whole, ours or ours-N"),
        (["--pairs", "4"], "--pairs is '4': expected batch x length"),
        (["--keep", "2"], "--keep is '2': expected shares"),
        (["--dtype", "int4"], "dtype 'int4': expected float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_one_line(blr: Run, options: list[str], message: str) -> None:
    done = blr("bench", "memory", "--device", "cpu", *options)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("blr: error: ") and message in line


def test_tracking_counts_what_lives_at_one_time() -> None:
    x = torch.zeros(256, 256)  # 1 MiB in four bytes each: 256 KiB

    def run() -> None:
        y = x + 1
        z = y.view(-1) * 2
        del y
        z.add_(1)
        torch.empty(1 << 20, device="meta")
        assert (z + 1).shape == (65536,)

    assert transient_bytes(run, torch.device("cpu")) == 2 * x.nbytes
