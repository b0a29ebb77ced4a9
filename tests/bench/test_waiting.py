"""On a CPU a benchmark says what it will do and how long that takes, and takes little by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from running import Invoke

from blr.compressor.bench import waiting
from blr.compressor.bench.runner import Case, Runner

CPU = ("--device", "cpu")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that are run, on a CPU of 50 GFLOPS; none is."""
    found: list[Case] = []

    def run_all(self: Runner, cases: Sequence[Case], *_: Any) -> None:
        found.extend(cases)

    monkeypatch.setattr(Runner, "run_all", run_all)
    monkeypatch.setattr(waiting, "_rate", lambda precision: 5e10)
    return found


def test_small_layers_by_default(ran: list[Case], invoke: Invoke) -> None:
    code, _, err = invoke("bench", "layers", *CPU)
    assert code == 0, err
    assert [case.title.split()[0] for case in ran] == ["gpt2-s"] * len(ran) and len(ran) == 6
    (line,) = err.splitlines()
    assert "6 cases on a CPU take about" in line and "(predicted)" in line


@pytest.mark.parametrize(
    "command",
    [("layers", "--models", "llama-7b", "--n", "1,1024,4096"), ("kernels",)],
)
def test_minutes_are_refused_unless_asked_for(
    command: tuple[str, ...], ran: list[Case], invoke: Invoke
) -> None:
    code, out, err = invoke("bench", *command, *CPU)
    assert (code, out) == (2, "") and not ran
    assert err.count("\n") == 1 and "minutes (predicted)" in err and "--seconds N" in err
    assert invoke("bench", *command, *CPU, "--seconds", "5")[0] == 0 and ran


def test_a_prediction_is_the_arms_and_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_rate", lambda precision: 1e9)
    cases = [
        Case("a", waiting.Precision("float32", "float32", False, 0.1), list, n, 1e9) for n in (2, 4)
    ]
    assert waiting.predicted_seconds(cases) == pytest.approx(6 * 0.05 + 2 * 8)
    monkeypatch.undo()
    assert 1e7 < waiting._rate(cases[0].precision) < 1e14
