"""Tests with the packages that people use our outputs with; collected in their environment only.

`scripts/check_packages.sh` makes it (the extra `packages`) and runs them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from exporting import Invoke

from blr.compressor.cli import main


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is imported, hence no package asked for, unless BLR_PACKAGES says so."""
    return None if os.environ.get("BLR_PACKAGES") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is collected here is marked so."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.packages)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs ``blr`` in this process: exit code, standard output and error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["blr", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run
