"""The scripts that measure on a GPU can be started: time on one is lost by a name that has moved."""

from __future__ import annotations

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
