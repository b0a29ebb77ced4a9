"""What is written says nothing of when and how fast: two runs give the same files, all of them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from heal_models import QUIET
from producing import files

from blr.compressor.base.disk import sha256_file
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.heal import heal
from blr.compressor.exporting.job import export
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.healing import trainer
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.workspace.manifest import MANIFEST


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is later than the one before by more and more."""
    ticks = count(1)
    monkeypatch.setattr(trainer, "monotonic", lambda: float(next(ticks)) ** 3)


def both(folder: Path, name: str) -> list[dict[str, str]]:
    """The SHA-256 of every file of two outputs, their manifests' among them."""
    places = [folder / name, folder / f"{name} again"]
    return [{**files(one), MANIFEST: sha256_file(one / MANIFEST)} for one in places]


@pytest.mark.usefixtures("slower")
def test_of_healing_and_of_its_export(compressed: Path, dense: Path, text: Path, tmp_path: Path) -> None:
    options = HealOptions(
        *("compressed", "dense"), data=(str(text),), window=16, batch=64, own_tokens=400, steps=4,
        device="cpu",
    )  # fmt: skip
    for name in ("healed", "healed again"):
        heal(compressed, dense, tmp_path / name, options, QUIET)
    one, other = both(tmp_path, "healed")
    assert one == other and {"metrics.jsonl", "report.json", "README.md"} <= set(one)
    for name in ("fast", "fast again"):
        export(tmp_path / "healed", tmp_path / name, ExportOptions("healed"), QUIET)
    one, other = both(tmp_path, "fast")
    assert one == other


@pytest.mark.parametrize("calibrated", [False, True])
def test_of_compression(calibrated: bool, dense: Path, text: Path, tmp_path: Path) -> None:
    settings = Settings("dense", calibration=str(text) if calibrated else None, device="cpu")
    more = {"samples": 4, "seq_len": 16} if calibrated else {}
    for name in ("small", "small again"):
        compress(dense, Recipe(method="svd", cf=1.5, **more), tmp_path / name, settings, QUIET)
    one, other = both(tmp_path, "small")
    assert one == other
