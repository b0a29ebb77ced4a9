"""On a CPU a benchmark takes little by itself, and minutes only if asked to."""

from __future__ import annotations

import pytest
from running import Invoke

from blr.bench.harness import Case, Harness

CPU = ("--device", "cpu")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that would be run."""
    found: list[Case] = []

    def run(self: Harness, cases: list[Case]) -> int:
        found.extend(cases)
        return 0

    monkeypatch.setattr(Harness, "run", run)
    return found


def test_small_layers_by_default(ran: list[Case], invoke: Invoke) -> None:
    code, _, err = invoke("bench", "layers", *CPU)
    assert code == 0, err
    assert [case.title.split()[0] for case in ran] == ["gpt2-s"] * len(ran) and len(ran) == 6


def test_minutes_are_refused_unless_asked_for(ran: list[Case], invoke: Invoke) -> None:
    command = ("bench", "layers", "--models", "llama-7b", "--n", "1,1024,4096", *CPU)
    code, out, err = invoke(*command)
    assert (code, out) == (2, "") and not ran
    assert err.count("\n") == 1 and "cases on a CPU take minutes" in err and "--seconds N" in err
    assert invoke(*command, "--seconds", "5")[0] == 0 and ran
