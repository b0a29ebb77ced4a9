"""The scripts that measure on a GPU can be started: time on one is lost by a name that has moved."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "scripts" / "bench"
SCRIPTS = [path for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text("utf-8")]


def load(script: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    for neighbour in FOLDER.glob("*.py"):
        monkeypatch.delitem(sys.modules, neighbour.stem, raising=False)
    spec = spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, script.stem, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(load(script, monkeypatch).main)


SMALL = {
    "kronecker": ["patterns", "--patterns", "(1,48,48,4)(3,48,16,4)", "--batch", "5"],
    "phases": ["--model=pico", "--layers=2", "--blocks=4", "--batches=1", "--arms=dense", "--steps=1"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_script_runs_in_small_on_a_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every arm is right, and the results are the harness's JSON."""
    script, out = load(FOLDER / f"{name}.py", monkeypatch), tmp_path / "out.json"
    common = ["--dtype", "float32", "--rounds", "1", "--device", "cpu", "-o", str(out)]
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name], *common])
    assert script.main() == 0, capsys.readouterr().out
    found = json.loads(out.read_text())
    assert set(found["summary"]["statuses"]) == {"ok"}
    assert all(row["ms"] > 0 and row["rel_error"] < 1e-5 for row in found["rows"])


def test_rules_of_the_shipped_table_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours where it is faster at every layer, the plain form where it is not at one."""
    script = load(FOLDER / "tune_table.py", monkeypatch)
    shape = {"inputs": 4096, "outputs": 4096, "blocks": 1, "rank": 1024}
    times = {4: [(1.0, 2.0), (1.0, 2.0)], 16: [(1.0, 2.0), (1.9, 1.0)]}  # of ours and the plain form
    rows = [
        {"structure": "lowrank", "shape": shape, "n": n, "times": {"narrow": a, "gemm": b, "dense": 3.0}}
        for n, both in times.items()
        for a, b in both
    ]
    found = [(tuple(rule["n"]), rule["variant"]) for rule in script.rules_of(rows)]
    assert found == [((4, 4), "narrow"), ((5, script.BUCKETS[-1]), "gemm")]
