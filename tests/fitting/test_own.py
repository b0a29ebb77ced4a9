"""Calibration on text of the model's own: how much of it, the same for the same seed, for whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heal_models import QUIET, save_dense, write_text
from pico import save_pico

from blr.compressor.base.errors import BlrError
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.fitting import engine
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.reading import Calibration
from blr.compressor.workspace.manifest import read_manifest

RECIPE = {"method": "svd", "cf": 1.5, "samples": 12, "seq_len": 16}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense") / "dense")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """Every calibration that a compression starts from."""
    found: list[Calibration] = []
    read = engine._read
    monkeypatch.setattr(engine, "_read", lambda *a: found.append(read(*a)) or found[-1])
    return found


def run(dense: Path, output: Path, text: str, **settings: object) -> dict[str, str]:
    """SHA-256 of every file of the output."""
    recipe = Recipe(**{**RECIPE, **settings})
    compress(dense, recipe, output, Settings("dense", device="cpu", calibration=text), QUIET)
    listed = read_manifest(output)["files"]
    return {name: entry["sha256"] for name, entry in listed.items()}


def test_own_text_alone(dense: Path, tmp_path: Path, seen: list[Calibration]) -> None:
    first = run(dense, tmp_path / "a", "self")
    assert torch.cat(seen[0].ids).shape == (12, 16) and seen[0].tokens == 12 * 16
    assert run(dense, tmp_path / "b", "self") == first
    assert run(dense, tmp_path / "c", "self", seed=1) != first
    assert json.loads((tmp_path / "a" / "report.json").read_text())["facts"]["calibration"]


@pytest.mark.parametrize(("mix", "own"), [(0.5, 6), (2 / 3, 8), (1.0, 12)])
def test_a_share_of_the_windows_is_own_text(
    mix: float, own: int, dense: Path, tmp_path: Path, seen: list[Calibration]
) -> None:
    text = write_text(tmp_path / "text.txt")
    run(dense, tmp_path / "out", str(text), mix=mix)
    letters = set(map(ord, "abcdefgh "))
    theirs = [set(row.tolist()) <= letters for row in torch.cat(seen[0].ids)]
    assert [theirs.count(False), theirs.count(True)] == [own, 12 - own]
    assert sum(theirs[:6]) == pytest.approx((12 - own) / 2, abs=1), "both from the beginning"


def test_a_file_of_that_name_is_a_text(
    dense: Path, tmp_path: Path, seen: list[Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "self")
    run(dense, tmp_path / "out", "self")
    assert set(torch.cat(seen[0].ids).flatten().tolist()) <= set(map(ord, "abcdefgh "))


def test_an_encoder_writes_nothing(tmp_path: Path) -> None:
    """Whoever asks for its own text is told to give one, or not to mix with what was given."""
    encoder, text = save_pico("bert", tmp_path / "bert"), write_text(tmp_path / "text.txt")
    for given, mix, remedy in (
        ("self", 0.0, "give a text by --text"),
        (text, 0.5, "leave --mix out"),
    ):
        with pytest.raises(BlrError, match=f"generates no text has none of its own; {remedy}") as raised:
            run(encoder, tmp_path / "out", str(given), mix=mix)
        assert raised.value.exit_code == 9
