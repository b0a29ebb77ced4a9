"""What healing is predicted to take, from headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heal_models import QUIET

from blr.compressor.base.errors import CapabilityError
from blr.compressor.commands.heal import HealRun, heal
from blr.compressor.exporting.origin import open_checkpoint
from blr.compressor.healing.data import reading_of
from blr.compressor.planning.forecast_healing import (
    HOST,
    SLICED,
    TRAINED,
    GpuGroup,
    forecast,
    kept_bytes,
    masters,
    planned,
    predicted,
    sizes_of,
    words,
)
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import MINUTES, HealOptions
from blr.compressor.workspace.workspace import Workspace
from configs import BILLION, LARGE, SMOL

H200, USUAL = find_gpu("h200"), HealOptions("", minutes=MINUTES)


def large(folder: Path, method: str = "svd", cf: float = 2.0) -> Any:
    """An 8B shape's outline and the specs of its layers."""
    (folder / "config.json").write_text(json.dumps(LARGE))
    source, _ = open_or_outline(folder)
    plan = make_plan(source, Recipe(method=method, cf=cf))
    return source, {planned.layer.module: planned.spec for planned in plan.layers}


@dataclass(frozen=True)
class Measured:
    """A healing alone on its GPUs, of an output by `recipe`: tokens a second between evaluations, and
    bytes of a GPU (scripts/log)."""

    config: dict[str, Any]
    recipe: dict[str, Any]
    speed: float
    size: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1


MONARCH = {"method": "monarch", "cf": 2.0}
RUNS = {
    "8b": Measured(LARGE, MONARCH, 7190, 139.8 * 2**30, {"batch": 8192}),
    "8b, inputs alone kept": Measured(
        LARGE, MONARCH, 6800, 91.4e9, {"batch": 8192, "checkpointing": True}
    ),
    "1b": Measured(BILLION, MONARCH, 47_597, 66.4 * 2**30),
    "1b on two": Measured(BILLION, MONARCH, 87_446, 45.2 * 2**30, gpus=2),
    "smollm2 in few bits": Measured(
        SMOL, {"method": "svd", "base": "int2", "rank": 16, "group": 64}, 192_000
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_healings_took_what_is_predicted(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    (tmp_path / "config.json").write_text(json.dumps(run.config))
    source, _ = open_or_outline(tmp_path)
    plan = make_plan(source, Recipe(**run.recipe))
    specs = {planned.layer.module: planned.spec for planned in plan.layers}
    found = predicted(source, specs, HealOptions("", **run.options), H200, GpuGroup(run.gpus))
    assert found.fits and found.tokens_per_second == pytest.approx(run.speed, rel=0.25)
    if run.size is not None:
        assert found.total == pytest.approx(run.size, rel=0.25)


def test_what_is_needed_is_told_beside_what_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    source, _ = open_or_outline(tmp_path)
    found = planned(source, make_plan(source, Recipe(method="monarch", cf=2.0)), USUAL, H200)
    assert 85e9 < found["least"] < 0.8 * found["total"]
    assert f"; {found['least'] / 1e9:,.1f} GB at least, with --checkpointing; " in found["said"]
    trained = sum(spec.parameters for spec in large(tmp_path, "monarch")[1].values())
    assert found["host"] > 4 * trained, "the best masters are kept there"
    assert found["disk"] > 20 * trained, "a state, and what it gives"


def test_no_speed_is_told_that_nobody_has_measured(dense: Path) -> None:
    source, _ = open_or_outline(dense)
    said = planned(source, make_plan(source, Recipe(method="svd", cf=2.0)), USUAL, H200)["said"]
    assert "over 500,000 tokens/s" in said


def test_an_8b_shape_fits_an_h200_and_no_smaller_gpu(tmp_path: Path) -> None:
    source, specs = large(tmp_path)
    found = predicted(source, specs, HealOptions(""), H200)
    assert found.fits and found.teacher == pytest.approx(2 * 8.03e9, rel=0.01)
    assert found.trained == TRAINED * sum(spec.parameters for spec in specs.values())
    for name in ("a40", "h100"):
        small = predicted(source, specs, HealOptions(""), find_gpu(name))
        assert not small.fits and small.micro == 1 and small.checkpointing
        assert words(small, name).startswith("healing does not fit")


def test_a_part_of_the_room_is_left_to_the_pools_of_graphs(tmp_path: Path) -> None:
    """Eight windows a pass of this, 142 GB by prediction, did not fit the 150 of an H200."""
    source, specs = large(tmp_path, "monarch")
    found = predicted(source, specs, HealOptions("", batch=8192), H200, GpuGroup(room=150e9))
    assert found.fits and found.micro == 4 and found.total < 0.92 * 150e9


def test_inputs_alone_are_kept_where_all_would_not_fit(tmp_path: Path) -> None:
    source, specs = large(tmp_path, "blast")
    found = predicted(source, specs, HealOptions(""), H200)
    assert found.fits and found.checkpointing
    asked = predicted(source, specs, HealOptions("", checkpointing=False), H200)
    assert not asked.checkpointing and asked.total > found.total and not asked.fits
    roomy = predicted(source, specs, HealOptions(""), replace(H200, memory_gb=500))
    assert roomy.fits and not roomy.checkpointing and roomy.micro > 1


def test_several_gpus_share_a_batch_and_where_they_must_the_model(tmp_path: Path) -> None:
    source, specs = large(tmp_path)
    alone, four = (predicted(source, specs, HealOptions(""), H200, GpuGroup(n)) for n in (1, 4))
    assert not four.sharded and four.trained == alone.trained
    assert 3 < four.tokens_per_second / alone.tokens_per_second < 4
    small = find_gpu("a40")
    assert not predicted(source, specs, HealOptions(""), small).fits
    shared = predicted(source, specs, HealOptions(""), small, GpuGroup(8))
    assert shared.fits and shared.sharded
    parts = sum(spec.parameters for spec in specs.values()) * SLICED / 8
    assert parts < shared.trained < 1.5 * parts + 6 * 8e9 / 32
    assert "with --fsdp" in words(shared, "a40")
    kept_whole = predicted(source, specs, HealOptions("", fsdp=False), small, GpuGroup(8))
    assert not kept_whole.fits and not kept_whole.sharded


def test_a_tiny_model_is_as_fast_as_the_host_and_the_memory_allow(dense: Path) -> None:
    """Its products alone would take next to no time."""
    source, _ = open_or_outline(dense)
    plan = make_plan(source, Recipe(method="svd", cf=2.0))
    specs = {planned.layer.module: planned.spec for planned in plan.layers}
    window = source.config["max_position_embeddings"]
    slow, fast = (predicted(source, specs, HealOptions("", window=n), H200) for n in (window // 4, 512))
    assert 0.9 < slow.tokens_per_second / (64 * window // 4 / HOST) < 1
    assert 0.9 < fast.tokens_per_second / (64 * window / HOST) < 1, "no window is longer than its most"


def test_full_numbers_of_what_is_packed_are_trained(tmp_path: Path) -> None:
    """W = Q + S holds every number of the dense weight as a master, and the scales of its groups."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    source, _ = open_or_outline(tmp_path)
    plan = make_plan(source, Recipe(method="svd", rank=16, base="int2"))
    specs = {planned.layer.module: planned.spec for planned in plan.layers}
    dense = sum(spec.dense_parameters for spec in specs.values())
    found = predicted(source, specs, HealOptions(""), H200)
    assert sum(map(masters, specs.values())) > dense * (1 + 1 / 128)
    assert found.trained > TRAINED * dense and not found.fits
    shared = predicted(source, specs, HealOptions(""), H200, GpuGroup(8))
    assert not shared.sharded, "what is packed is not shared out"


@pytest.mark.parametrize("kind", ["fp8", "int8", "int2"])
def test_every_kind_of_number_is_planned(kind: Any, dense: Path) -> None:
    source, _ = open_or_outline(dense)
    found = planned(source, make_plan(source, Recipe(method="svd", cf=1.5, quantize=kind)), USUAL, H200)
    assert found["fits"] and found["trained"] > 0


def test_more_room_gives_more_windows_a_pass(tmp_path: Path) -> None:
    source, specs = large(tmp_path)
    sizes = sizes_of(source.config, specs, 0, ("factors",))
    rooms = [1.3e11, 2e11, 4e11]
    found = [forecast(sizes, specs, HealOptions(""), H200, GpuGroup(room=room)) for room in rooms]
    assert [f.fits for f in found] == [True] * 3
    assert found[0].micro < found[1].micro < found[2].micro <= 64


def test_the_embeddings_cost_when_they_are_trained(tmp_path: Path) -> None:
    source, specs = large(tmp_path)
    plain, more = (
        sizes_of(source.config, specs, 0, kinds) for kinds in (("factors",), ("factors", "embeddings"))
    )
    assert more.trained - plain.trained == 128256 * 4096
    assert sizes_of(source.config, specs, 0, ("norms",)).trained == 0


def test_compared_outputs_of_blocks_are_the_teachers_too(tmp_path: Path) -> None:
    source, specs = large(tmp_path)
    alone, compared = (
        predicted(source, specs, HealOptions("", hidden=hidden), H200) for hidden in (0.0, None)
    )
    tokens = compared.micro * HealOptions("").window
    assert compared.micro == alone.micro
    assert compared.activations - alone.activations == pytest.approx(2 * tokens * 4096 * 32)


def test_a_run_that_cannot_fit_ends_before_any_weight_is_loaded(
    compressed: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10_000_000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room[0], room[0]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    processes: Any = SimpleNamespace(device=torch.device("cuda"), count=1, gather=lambda value: [value])
    student, teacher = open_checkpoint(compressed), open_checkpoint(dense)
    workspace: Any = None
    options = HealOptions("c", "d")
    reading = reading_of(teacher, options)
    job = HealRun(student, teacher, options, processes, workspace, QUIET, reading)
    with pytest.raises(CapabilityError, match=r"does not fit: .* of the 0 that may be filled of a card"):
        job._plan_memory()
    room[0] = 140_000_000_000
    job._plan_memory()
    assert job.options.checkpointing is False


def test_room_for_two_states_where_a_second_is_saved(dense: Path) -> None:
    source, _ = open_or_outline(dense)
    specs = {p.layer.module: p.spec for p in make_plan(source, Recipe(method="svd", cf=1.5)).layers}
    vectors = sum(e.parameters for e in source.entries.values() if len(e.shape) == 1)
    trained = sum(spec.parameters for spec in specs.values()) + vectors
    for minutes, save, each in ((3.0, 10.0, 20), (30.0, 10.0, 36), (None, 10.0, 36)):
        options = HealOptions("", minutes=minutes, save_minutes=save)
        assert kept_bytes(specs, source.entries, options) == each * trained
    every = HealOptions("", minutes=3.0, train=("factors", "embeddings"), save_minutes=10.0)
    assert kept_bytes(specs, source.entries, every) > 20 * trained
    assert kept_bytes(specs, source.entries, replace(every, train=("norms",))) == 20 * vectors > 0


def test_a_small_model_asks_for_little_disk(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as it takes, with what it writes of its own and a MiB for small files."""
    asked, taken = [], []
    room, commit = Workspace.room, Workspace.commit

    def noted(self: Workspace, needed: int, check: bool = True) -> Any:
        asked.append(needed)
        return room(self, needed, check)

    def measured(self: Workspace) -> None:
        taken.append(self.used_bytes())
        commit(self)

    monkeypatch.setattr(Workspace, "room", noted)
    monkeypatch.setattr(Workspace, "commit", measured)
    options = HealOptions("c", "d", window=16, batch=64, steps=2, device="cpu", check=False)
    heal(compressed, dense, tmp_path / "out", options, QUIET)
    assert taken[0] < asked[0] < taken[0] + (4 << 20)
