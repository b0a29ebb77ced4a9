"""What a run says where there is no terminal: a line now and then, with the time that is left."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from running import Invoke

from blr.compressor import progress
from blr.compressor.progress import Progress, duration

pytestmark = pytest.mark.fast


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the next calls are told."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_a_line_every_half_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().layers(8, "factorizing") as advance:
        for number in range(8):
            clock[0] = 20.0 * number
            advance(f"layer {number}")
    assert capsys.readouterr().err.splitlines() == [
        "blr: note: factorizing: 2 of 8, 40 s, about 2 min left",
        "blr: note: factorizing: 4 of 8, 80 s, about 80 s left",
        "blr: note: factorizing: 6 of 8, 2 min, about 40 s left",
    ]


def test_training_says_what_it_is_told(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress().training("healing") as reached:
        reached(0.0, "step 0")
        clock[0] = 60.0
        reached(0.25, "loss 0.5")
    assert capsys.readouterr().err == "blr: note: healing: 25% loss 0.5, 60 s, about 3 min left\n"


def test_what_earlier_runs_have_done_is_no_pace(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress().training("healing", 0.5) as reached:
        clock[0] = 60.0
        reached(0.51, "loss 0.5")
    assert capsys.readouterr().err == "blr: note: healing: 51% loss 0.5, 60 s, about 49 min left\n"


def test_nothing_when_it_is_quiet(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=True).layers(2) as advance:
        advance("a")
        clock[0] = 1000.0
        advance("b")
    Progress(quiet=True).say("resumed")
    assert capsys.readouterr().err == ""


def test_durations_are_read_at_a_glance() -> None:
    found = [duration(seconds) for seconds in (0.4, 89, 90, 3600, 3 * 3600 + 300)]
    assert found == ["0 s", "89 s", "2 min", "60 min", "3 h 5 min"]


def test_seconds_are_added_up_by_what_they_went_into(clock: list[float]) -> None:
    told = Progress(quiet=True)
    for what, seconds in (("fits", 2.0), ("check", 1.5), ("fits", 4.0)):
        with suppress(KeyError), told.timed(what):
            clock[0] += seconds
            raise KeyError  # failed work took its time, too
    assert told.spent == {"fits": 6.0, "check": 1.5}
    with told.timed("healing"):  # what it times itself counts once
        clock[0] += 8.0
        for seconds in (1.0, 2.0):
            with told.timed("check"):
                clock[0] += seconds
    assert told.spent == {"fits": 6.0, "check": 4.5, "healing": 8.0}


def test_a_summary_says_where_the_time_went(tiny: Path, tmp_path: Path, invoke: Invoke) -> None:
    command = (
        "compress",
        tiny,
        "--method",
        "svd",
        "--cf",
        "2",
        "--calibration",
        "self",
        "--samples",
        "2",
    )
    code, out, err = invoke(*command, "--seq-len", "16", "-o", tmp_path / "out", "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    names = ["reading", "text", "sensitivity", "inputs", "fits", "writing", "check"]
    assert list(found["spent"]) == [*names, "libraries and the rest"]
    assert sum(found["spent"].values()) == pytest.approx(
        found["seconds"], abs=0.05 * len(found["spent"])
    )
