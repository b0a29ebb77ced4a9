"""Trackers of accelerate are told what metrics.jsonl says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import tracking as trackers
from heal_models import QUIET

from blr.compressor.errors import BlrError
from blr.compressor.heal.run import heal
from blr.compressor.heal.settings import HealOptions

FAILS_AT = 3


class Told:
    """A tracker in the shape of accelerate's."""

    requires_logging_directory = True
    lines: ClassVar[list[tuple[int, dict[str, Any]]]] = []
    ended = fails = False

    def __init__(self, name: str, folder: str) -> None:
        assert name == "out"

    def start(self) -> None:
        Told.lines = []

    def log(self, values: dict[str, Any], step: int) -> None:
        if Told.fails and step == FAILS_AT:
            raise ConnectionError("no network")
        Told.lines.append((step, values))

    def finish(self) -> None:
        Told.ended = True


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.LOGGER_TYPE_TO_CLASS, "told", Told)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["told"])
    monkeypatch.setattr(Told, "fails", False)


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


def test_one_that_fails_does_not_end_the_run(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Told, "fails", True)
    run(compressed, dense, tmp_path / "out")
    assert (tmp_path / "out").exists() and max(step for step, _ in Told.lines) == FAILS_AT - 1


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
