"""Trackers of accelerate are told what metrics.jsonl says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import tracking as trackers
from heal_models import QUIET

from blr.compressor.base.errors import BlrError
from blr.compressor.commands.heal import heal
from blr.compressor.healing import trainer
from blr.compressor.recipe.settings import HealOptions

FAILS_AT = 3
END = -1  # where `finish` fails


class Told:
    """A tracker in the shape of accelerate's."""

    requires_logging_directory = True
    lines: ClassVar[list[tuple[int, dict[str, Any]]]] = []
    ended = False
    fails: ClassVar[int | None] = None  # the step at which it does

    def __init__(self, name: str, folder: str) -> None:
        assert name == "out"

    def start(self) -> None:
        Told.lines = []

    def log(self, values: dict[str, Any], step: int) -> None:
        if step == Told.fails:
            raise ConnectionError("no network")
        Told.lines.append((step, values))

    def finish(self) -> None:
        Told.ended = True
        if Told.fails == END:
            raise ConnectionError("no network")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "told", Told)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["told"])
    monkeypatch.setattr(Told, "fails", None)
    monkeypatch.setattr(Told, "ended", False)


def run(compressed: Path, dense: Path, output: Path, track: str = "told") -> None:
    options = HealOptions(
        "compressed", "dense", window=16, batch=64, own_tokens=400, steps=4, device="cpu", track=track
    )
    heal(compressed, dense, output, options, QUIET)


def test_every_line_is_told(compressed: Path, dense: Path, tmp_path: Path) -> None:
    run(compressed, dense, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in Told.lines] == [line["step"] for line in lines] and Told.ended
    assert Told.lines[0][1]["held/self/kl"] == lines[0]["held"]["self"]["kl"]


@pytest.mark.parametrize("fails", [FAILS_AT, END])
def test_one_that_fails_does_not_end_the_run(
    fails: int, compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "fails", fails)
    run(compressed, dense, tmp_path / "out")
    assert (tmp_path / "out").exists()
    assert max(step for step, _ in Told.lines) == (4 if fails == END else FAILS_AT - 1)


def test_what_is_left_is_written_when_the_run_fails(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr(trainer.Trainer, "run", fail)
    with pytest.raises(RuntimeError, match="no step"):
        run(compressed, dense, tmp_path / "out")
    assert Told.ended


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("wandb", 9, "pip install wandb"), ("paper", 2, "expected one of aim")],
)
def test_one_that_is_not_there_is_refused_at_once(
    name: str, code: int, said: str, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    with pytest.raises(BlrError, match=said) as raised:
        run(compressed, dense, tmp_path / "out", name)
    assert raised.value.exit_code == code and not list(tmp_path.iterdir())
