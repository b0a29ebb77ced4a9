"""What compressing is predicted to take, against what was measured (scripts/log)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from running import Invoke

from blr.compressor.base.disk import folder_bytes
from blr.compressor.commands import compress_run
from blr.compressor.planning.forecast import SMALL, Compression, Fits, forecast, room, words
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.recipe.schema import Recipe
from blr.compressor.workspace.workspace import Workspace
from configs import BILLION, LARGE, SMOL

H200 = find_gpu("h200")
WITHIN = 0.25  # of what was measured
BLAST = {"method": "blast", "blocks": 16, "cf": 2.0}
MIXED = {"samples": 512, "mix": 0.67}
FEW = {"method": "svd", "rank": 16, "group": 64, **MIXED}


@dataclass(frozen=True)
class Measured:
    """A run alone on one GPU: of `blocks` of a model (all of its own where None), by a recipe; seconds
    in all and by phases, GiB of the GPU and of the host."""

    config: dict[str, Any]
    recipe: dict[str, Any]
    seconds: float | None = None
    gpu: float | None = None
    host: float | None = None
    blocks: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    card: str = "h200"


RUNS = {  # of entries of 2026-11-26, and of 2026-11-24 and -23 what no later one measured again
    "8b": Measured(
        *(LARGE, BLAST, 1278.6, 64.7, 4.5),
        phases={
            **{"fits": 772.7, "refits": 275.7, "sensitivity": 76.5, "inputs": 22.5},
            **{"reading, writing and the check": 23.7, "libraries and the rest": 104.9},
        },
    ),
    "8b of 8 blocks, last pass": Measured(
        *(LARGE, BLAST, 482.8, 77.7, 3.4),
        blocks=8,
        phases={"fits": 197.7, "refits": 67.6, "sensitivity": 17.0, "inputs": 6.2, "last pass": 145.3},
    ),
    "8b of 2 blocks": Measured(LARGE, BLAST | {"finish": 0}, 115.9, blocks=2),
    "8b of one block": Measured(LARGE, BLAST, gpu=58.2, host=5.3, blocks=1),
    "1b of 3 blocks": Measured(BILLION, BLAST, gpu=30.2, blocks=3, card="h100"),
    "smollm2 cf 1.25": Measured(
        *(SMOL, BLAST | MIXED | {"cf": 1.25}, 131.0),
        phases={"fits": 44.4, "last pass": 36.0, "refits": 11.2, "inputs": 9.6, "own text": 6.7},
    ),
    "smollm2 cf 2": Measured(SMOL, BLAST | MIXED, 121.8),
    "smollm2 of 10 blocks": Measured(SMOL, BLAST | {"samples": 512}, 57.0, blocks=10),
    "smollm2 int2": Measured(SMOL, FEW | {"base": "int2"}, 148.8),
    "smollm2 int3": Measured(SMOL, FEW | {"base": "int3"}, 160.8),
}


def work_of(folder: Path, run: Measured, calibrated: bool = True) -> Compression:
    config = run.config | ({"num_hidden_layers": run.blocks} if run.blocks else {})
    (folder / "config.json").write_text(json.dumps(config))
    source, recipe = open_or_outline(folder)[0], Recipe(**run.recipe)
    plan = make_plan(source, recipe, calibrated=calibrated)
    return Compression(source, plan, recipe, find_gpu(run.card), calibrated)


def predicted(folder: Path, run: Measured, gpus: int = 1, calibrated: bool = True) -> Fits:
    return forecast(work_of(folder, run, calibrated), gpus)


@pytest.mark.parametrize("name", RUNS)
def test_runs_took_what_is_predicted(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    found = predicted(tmp_path, run)
    told = {"seconds": found.seconds, "gpu": found.taken / 2**30, "host": found.host / 2**30}
    told |= {phase: found.phases[phase] for phase in run.phases}
    known = {"seconds": run.seconds, "gpu": run.gpu, "host": run.host, **run.phases}
    known = {what: value for what, value in known.items() if value is not None}
    assert {what: told[what] for what in known} == pytest.approx(known, rel=WITHIN)
    assert found.fits and found.memory < found.taken


def test_two_gpus_gained_what_is_predicted(tmp_path: Path) -> None:
    """91.2 and 71.1 s of two blocks of a 1B, by fits of that day; 22.9 GiB each of three."""
    run = Measured(BILLION, BLAST, blocks=2)
    one, two = (predicted(tmp_path, run, gpus) for gpus in (1, 2))
    gained = one.seconds / two.seconds
    assert gained == pytest.approx(91.2 / 71.1, rel=0.1)
    three = predicted(tmp_path, RUNS["1b of 3 blocks"], 2)
    assert three.taken / 2**30 == pytest.approx(22.9, rel=WITHIN)


EVALUATION = {"gate_proj": 33.5, "down_proj": 73.0, "q_proj": 13.9}  # ms of an 8B's layers
GIB = {"q_proj": 1.7, "up_proj": 2.9, "down_proj": 5.0}  # of a 7B's, before V'H was held


def test_a_layer_takes_what_was_measured(tmp_path: Path) -> None:
    work = work_of(tmp_path, Measured(LARGE, BLAST, blocks=1))
    for layer in work.plan.layers:
        if (milliseconds := EVALUATION.get(layer.layer.type)) is not None:
            assert work.layer_seconds(layer) > 100 * 0.8 * milliseconds / 1e3
            assert work.layer_seconds(layer) < 100 * 1.7 * milliseconds / 1e3, layer.layer.module
    seven = LARGE | {"intermediate_size": 11008, "num_key_value_heads": 32}
    work = work_of(tmp_path, Measured(seven, BLAST | {"refit": 0, "allocation": "uniform"}, blocks=1))
    assert room(work)[0] > max(GIB.values()) * 2**30


@pytest.mark.parametrize("calibrated", [False, True])
def test_gpus_share_the_work(calibrated: bool, tmp_path: Path) -> None:
    run = Measured(LARGE, {"method": "svd", "cf": 2.0}, blocks=4)
    one, two = (predicted(tmp_path, run, n, calibrated) for n in (1, 2))
    assert one.phases["fits"] / 2 < two.phases["fits"] < one.phases["fits"]
    assert "of each of 2 h200" in words(two, "h200") and "each" not in words(one, "h200")


def test_what_a_gpu_has_no_room_for_is_not_taken_there(tmp_path: Path) -> None:
    """States and inputs of all batches of an 8B lie on the host, or are made again, on an L4."""
    small = predicted(tmp_path, Measured(LARGE, BLAST, card="l4"))
    large = predicted(tmp_path, Measured(LARGE, BLAST))
    assert small.memory == large.memory and small.taken < large.taken and small.host > large.host
    assert small.fits and "last pass" not in small.phases
    seventy = LARGE | {"hidden_size": 8192, "intermediate_size": 28672}
    assert words(predicted(tmp_path, Measured(seventy, BLAST, card="l4")), "l4").startswith(
        "compressing does not fit: "
    )


@pytest.mark.parametrize("options", [("--method", "svd"), ("--base", "int2", "--rank", "8")])
def test_a_run_takes_the_disk_that_is_predicted(
    options: tuple[str, ...],
    tiny: Path,
    sample: Path,
    tmp_path: Path,
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, asked = list[int](), list[int]()
    commit, estimate = Workspace.commit, compress_run.CompressRun.estimate
    monkeypatch.setattr(
        Workspace, "commit", lambda self: (used.append(folder_bytes(self.partial)), commit(self))[1]
    )
    monkeypatch.setattr(
        compress_run.CompressRun, "estimate", lambda self: asked.append(estimate(self)) or asked[-1]
    )
    text = (
        "--calibration",
        sample,
        "--samples",
        "4",
        "--force",
        "--seq-len",
        "32",
        "--refit",
        "1",
        "--finish",
        "1",
    )
    code, _, err = invoke("compress", tiny, *options, *text, "-o", tmp_path / "out")
    assert code == 0, err
    assert used[0] < asked[0] and asked[0] - SMALL == pytest.approx(used[0], rel=WITHIN)
