"""Tests with the packages that people use our outputs with; collected in their environment only.

`scripts/check_packages.sh` makes it (the extra `packages`) and runs them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing here is imported, hence no package asked for, unless BLR_PACKAGES says so."""
    return None if os.environ.get("BLR_PACKAGES") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is collected here is marked so."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.packages)
