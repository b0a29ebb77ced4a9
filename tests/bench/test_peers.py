"""The table of other packages: who is where, and that the page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blr.bench.peers import draw

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.fast


def row(kl: float, package: str = "blr", series: str = "blr", form: str = "int3") -> dict[str, Any]:
    figures = {"kl": kl, "kl_error": 0.001, "agreement": 0.5}
    about = {"package": package, "version": "1", "bits": 3.25, "seconds": 2.0}
    return {
        "series": series,
        "form": form,
        **about,
        "texts": {"prose": figures, "other": figures | {"kl": 2 * kl}},
    }


def test_seeds_share_a_row_and_the_least_divergence_is_first() -> None:
    ours = [row(kl, series="blr, rank 16") for kl in (0.1, 0.2)]
    rows = {"HQQ, int3": row(0.4, "hqq", "HQQ"), "seed 0": ours[0], "seed 1": ours[1]}
    head, _, first, second = draw.table(rows).splitlines()
    assert "KL, top-1 % on prose" in head
    assert first.startswith("| blr, rank 16, int3 |")
    assert ".100/.200 ± .001, 50.0" in first
    assert second.startswith("| HQQ, int3 (hqq 1) |")


def test_the_plot_has_a_line_for_each_package_on_each_text() -> None:
    rows = {"3": row(0.4, "hqq", "HQQ"), "4": row(0.3, "hqq", "HQQ", "int4"), "blr": row(0.1)}
    rows["far"] = row(0.2, series="blr, BLAST", form="CF 1.5") | {"bits": 10.7}  # in the table alone
    assert draw.drawn(rows).count("<polyline") == 4


def test_the_plot_takes_the_best_of_ours_at_each_number_of_bits() -> None:
    points = [[row(0.3)], [row(0.1, series="blr, rank 16")], [row(0.2) | {"bits": 4.25}]]
    assert draw.places(points, 0) == [(3.25, 0.1), (4.25, 0.2)]
    assert draw.line_of("blr, rank 16, healed") == "blr, healed"


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "recipes/README.md").read_text("utf-8")
    for path in (ROOT / "scripts/figures").glob("peers-*.json"):
        rows = json.loads(path.read_text("utf-8"))
        assert f"<!-- {path.stem} -->\n{draw.table(rows)}\n<!-- /{path.stem} -->" in page
        assert path.with_suffix(".svg").read_text("utf-8") == draw.drawn(rows)
