"""Fixtures of the export tests: outputs of `blr compress`, and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from exporting import compress_to, export_to

METHODS = {
    "svd": {"cf": 1.25, "heads": "grouped:2"},
    "monarch": {"cf": 1.25, "blocks": 4},
    "blast": {"cf": 1.25, "blocks": 4, "rounds": 5},
    "ks": {"cf": 1.25},
}


@pytest.fixture(scope="session")
def sources(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tiny-llama by name of its structure, "dense" as it is."""
    folder = tmp_path_factory.mktemp("sources")
    outputs = {m: compress_to(tiny, folder / m, method=m, **given) for m, given in METHODS.items()}
    return {"dense": tiny, **outputs}


@pytest.fixture(scope="session")
def exports(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of `sources`, for two sequences of 128 tokens."""
    folder = tmp_path_factory.mktemp("exports")
    return {
        name: export_to(source, folder / name, batch=2, context=128) for name, source in sources.items()
    }
