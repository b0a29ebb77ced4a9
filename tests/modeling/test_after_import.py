"""What waits for a package runs when that is imported, however late, and never imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from blr.compressor.modeling.after_import import after_import

pytestmark = pytest.mark.fast


def test_it_runs_once_after_the_packages_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for").mkdir()
    (tmp_path / "waited_for" / "__init__.py").write_text("ready = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    found: list[bool] = []
    before = len(sys.meta_path)
    after_import("waited_for", lambda: found.append(sys.modules["waited_for"].ready))
    assert importlib.util.find_spec("waited_for") and not found and "waited_for" not in sys.modules
    importlib.import_module("waited_for")
    assert found == [True] and len(sys.meta_path) == before
    after_import("waited_for", lambda: found.append(False))  # imported already
    assert found == [True, False]
    monkeypatch.delitem(sys.modules, "waited_for")


def test_all_that_wait_for_a_package_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is loaded with its own code brings a second copy of what waits."""
    (tmp_path / "waited_for_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    found: list[int] = []
    before = len(sys.meta_path)
    for number in (1, 2):
        after_import("waited_for_by_two", lambda number=number: found.append(number))
    importlib.import_module("waited_for_by_two")
    assert sorted(found) == [1, 2] and len(sys.meta_path) == before
    monkeypatch.delitem(sys.modules, "waited_for_by_two")


def test_a_package_that_is_not_there_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    after_import("nowhere_to_be_found", lambda: pytest.fail("it is not there"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere_to_be_found")
