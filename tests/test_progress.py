"""What a run says where there is no terminal: a line now and then, with the time that is left."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from running import Invoke

from blr.compressor.base import progress
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import Progress, duration
from blr.compressor.fitting import sequential

pytestmark = pytest.mark.fast


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the next calls are told."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 200 columns is sent."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, color_system="standard", width=200)
    monkeypatch.setattr(progress, "_console", lambda: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    return sent


def seen(bars: progress.Bar) -> str:
    """The bar as it stands now, without its colours."""
    console = Console(file=io.StringIO(), width=200)
    console.print(bars.bars.get_renderable())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


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
        "--force",
    )
    code, out, err = invoke(*command, "--seq-len", "16", "-o", tmp_path / "out", "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    names = ["reading", "text", "sensitivity", "inputs", "fits", "writing", "check"]
    assert list(found["spent"]) == [*names, "libraries and the rest"]
    assert sum(found["spent"].values()) == pytest.approx(
        found["seconds"], abs=0.05 * len(found["spent"])
    )


def test_a_bar_tells_the_time_that_is_left_however_long_items_take(
    clock: list[float], screen: io.StringIO
) -> None:
    """Items of forty minutes: rich's own column forgets what is older than half a minute."""
    with Progress().layers(4, "factorizing") as bar:
        bar("first")
        assert "-:--:-- left" in seen(bar) and "0/4" in seen(bar)
        clock[0] = 2400.0
        bar("second")
        assert "2:00:00 left" in seen(bar) and "1/4" in seen(bar) and "second" in seen(bar)
        clock[0] = 2460.0
        assert "1:59:00 left" in seen(bar)


def test_what_costs_more_is_more_of_the_time_that_is_left(clock: list[float]) -> None:
    """A sensitivity's forward passes took ten seconds, its backward ones take four times as long."""
    costs = {"a": 1.0, "b": 1.0, "c": 4.0, "d": 4.0}
    with Progress(quiet=True).layers(4, costs=costs) as advance:
        for name, now in zip("abc", (0.0, 5.0, 10.0), strict=True):
            clock[0] = now
            advance(name)
        assert advance.pace.left == pytest.approx(40.0)


def test_what_an_earlier_run_has_made_is_no_pace(clock: list[float]) -> None:
    with Progress(quiet=True).layers(10) as advance:
        for name in ("a", "b", "c", "d"):
            advance(name, there=[name])
        assert advance.pace.left is None
        advance("e", "f")
        clock[0] = 60.0
        advance("g")
        assert advance.pace.left == pytest.approx(4 * 30.0)


def test_a_bar_is_red_where_its_work_fails_and_only_there(screen: io.StringIO) -> None:
    with Progress().layers(2) as advance:
        advance("a")
        advance("b")
    assert "\x1b[36m" in screen.getvalue()
    reds = re.compile(r"\x1b\[(?:[\d;]*;)?(?:31|91)m|38;2;249;38;114")
    assert not reds.search(screen.getvalue())
    with suppress(KeyError), Progress().layers(2) as advance:
        advance("a")
        advance("b")
        raise KeyError
    assert reds.search(screen.getvalue())


def test_names_of_layers_are_no_markup_and_no_orders_to_a_terminal(screen: io.StringIO) -> None:
    with Progress().layers(1) as advance:
        advance("[red]a\x1b[31m")
        assert "[red]a\\x1b[31m" in seen(advance)


def test_bars_say_which_step_they_are(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    told = Progress()
    told.expect("reading", "fitting", "last", "writing", "writing")
    told.leave_out("last")
    for what in ("reading", "reading", "writing", "own", "writing"):
        with told.layers(2, what) as advance:
            advance("a")
            clock[0] += 40.0
            advance("b")
    heads = [
        line.removeprefix("blr: note: ").partition(":")[0]
        for line in capsys.readouterr().err.splitlines()
    ]
    assert heads == [
        "step 1 of 4, reading",
        "step 1 of 4, reading",  # of another checkpoint
        "step 3 of 4, writing",  # fits were there already
        "own",
        "step 4 of 4, writing",
    ]


def test_libraries_are_announced_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    Progress().loading()  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Progress(quiet=True).loading()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    Progress().loading()
    monkeypatch.setitem(sys.modules, "torch", pytest)
    Progress().loading()
    assert capsys.readouterr().err == "loading torch …\n"


CALIBRATED = (
    "--force",
    "--method",
    "svd",
    "--cf",
    "2",
    "--calibration",
    "self",
    "--samples",
    "2",
    "--seq-len",
    "16",
)


def test_a_resumed_run_counts_layers_alone_and_its_bars_are_numbered(
    tiny: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own text, statistics and refits are in the journal, too."""
    fit, count, bars = sequential.fit_together, [0], []

    def stopping(*given: Any) -> Any:
        count[0] += 1
        if count[0] == 10:
            raise CapabilityError("stopped")
        return fit(*given)

    command = ("compress", tiny, *CALIBRATED, "--refit", "1", "--finish", "1", "-o", tmp_path / "out")
    monkeypatch.setattr(sequential, "fit_together", stopping)
    assert invoke(*command)[0] == CapabilityError.exit_code
    shown = Progress._named
    monkeypatch.setattr(Progress, "_named", lambda *a: bars.append(shown(*a)) or bars[-1])
    code, _, err = invoke(*command)
    assert code == 0 and "resumed with 9 of 28 layers" in err, err
    assert bars == [
        *("step 1 of 7, reading", "step 4 of 7, factorizing"),
        *("step 5 of 7, training all blocks together", "step 6 of 7, writing", "step 7 of 7, checking"),
    ]
