"""The table of other packages: who is where, and that the page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blr.bench.peers import draw

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fast


def row(kl: float, package: str = "blr") -> dict[str, Any]:
    figures = {"kl": kl, "kl_error": 0.001, "agreement": 0.5}
    about = {"package": package, "version": "1", "bits": 3.25, "seconds": 2.0}
    return {**about, "texts": {"prose": figures, "other": figures | {"kl": 2 * kl}}}


def test_seeds_share_a_row_and_the_least_divergence_is_first() -> None:
    rows = {"hqq-3": row(0.4, "hqq"), "blr-3-16-0": row(0.1), "blr-3-16-1": row(0.2)}
    head, _, first, second = draw.table(rows).splitlines()
    assert "KL, top-1 on prose" in head
    assert first.startswith("| blr, rank 16, int3 |")
    assert "0.100 and 0.200 ± 0.001, 50.0%" in first
    assert second.startswith("| HQQ, int3 (hqq 1) |")


def test_the_plot_has_a_line_for_each_package_on_each_text() -> None:
    rows = {"hqq-3": row(0.4, "hqq"), "hqq-4": row(0.3, "hqq"), "blr-3-0-0": row(0.1)}
    assert draw.drawn(rows).count("<polyline") == 4


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "recipes/README.md").read_text("utf-8")
    for path in (ROOT / "scripts/figures").glob("peers-*.json"):
        rows = json.loads(path.read_text("utf-8"))
        assert f"<!-- {path.stem} -->\n{draw.table(rows)}\n<!-- /{path.stem} -->" in page
        assert path.with_suffix(".svg").read_text("utf-8") == draw.drawn(rows)
