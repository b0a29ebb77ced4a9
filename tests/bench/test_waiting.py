"""On a CPU a benchmark says what it will do and how long that takes, and takes little by itself."""

from __future__ import annotations

import pytest
from running import Invoke

from blr.bench import layers
from blr.bench.checks import PRECISIONS
from blr.bench.harness import Case, Harness
from blr.bench.layers import announce, cpu_rate
from blr.bench.shapes import find_layers, specs_for

CPU = ("--device", "cpu")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that are run, on a CPU of 50 GFLOPS; none is."""
    found: list[Case] = []

    def run(self: Harness, cases: list[Case]) -> int:
        found.extend(cases)
        return 0

    monkeypatch.setattr(Harness, "run", run)
    monkeypatch.setattr(layers, "cpu_rate", lambda precision: 5e10)
    return found


def test_small_layers_by_default(ran: list[Case], invoke: Invoke) -> None:
    code, _, err = invoke("bench", "layers", *CPU)
    assert code == 0, err
    assert [case.title.split()[0] for case in ran] == ["gpt2-s"] * len(ran) and len(ran) == 6
    (line,) = err.splitlines()
    assert "6 cases on a CPU take about" in line and "(predicted)" in line


def test_minutes_are_refused_unless_asked_for(ran: list[Case], invoke: Invoke) -> None:
    command = ("bench", "layers", "--models", "llama-7b", "--n", "1,1024,4096", *CPU)
    code, out, err = invoke(*command)
    assert (code, out) == (2, "") and not ran
    assert err.count("\n") == 1 and "minutes (predicted)" in err and "--seconds N" in err
    assert invoke(*command, "--seconds", "5")[0] == 0 and ran


def test_a_prediction_is_the_arms_and_their_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    precision, layer = PRECISIONS["float32"], find_layers(["vit-b"])[0]
    (spec,) = specs_for(layer, ["svd"])
    numbers = layer.in_features * layer.out_features + 2 * spec.parameters
    rate = 8 * 2 * 34 * numbers / 20  # a case of two tokens takes 20 seconds beside its three arms
    monkeypatch.setattr(layers, "cpu_rate", lambda precision: rate)
    assert "2 cases on a CPU take about 40 s" in announce([(layer, [spec], 2)] * 2, precision, None)
    monkeypatch.undo()
    assert 1e7 < cpu_rate(precision) < 1e14
