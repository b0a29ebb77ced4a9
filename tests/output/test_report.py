"""The report: the same bytes every time, well-formed, self-contained, and honest about gaps."""

from __future__ import annotations

import json
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from blr.compressor.checkpoint.source import open_source
from blr.compressor.output.page import report_html
from blr.compressor.output.report import report_files, report_pages, thin_curve
from blr.compressor.output.svg import Series, chart
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.recipe.schema import make_recipe

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
FACTS: dict[str, Any] = {
    "name": "tiny <&> llama",
    "method": "blast",
    "cf": 2.0,
    "calibration": {"tokens": 131072, "digest": "ab12"},
    "versions": {"blr": "1", "torch": "2"},
}


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    rules = [{"match": "*.v_proj", "method": "dense"}]
    return make_plan(open_source(tiny), make_recipe(method="blast", rules=rules, blocks=7))


def records(plan: Plan, **extra: Any) -> dict[str, dict[str, Any]]:
    return {
        planned.layer.module: {
            "type": planned.layer.type,
            "spec": planned.spec.to_dict(),
            "error": 0.1 + n / 100,
            "notes": ["jitter <raised>"] if n == 0 else [],
            **extra,
        }
        for n, planned in enumerate(plan.layers)
    }


def drawn(page: bytes, shape: str) -> int:
    """How many of one SVG shape the page holds; it must be well-formed."""
    return len(ElementTree.fromstring(page).findall(f".//{SVG}{shape}"))


def test_pages_are_well_formed_self_contained_and_deterministic(plan: Plan) -> None:
    found = records(plan, weighted_error=0.05, curve=[0.9**n for n in range(64)])
    files = report_files(plan, found, FACTS)
    assert files == report_files(plan, dict(found), dict(FACTS))
    loss = {"read": "text", "loss": 0.8, "agreement": 0.5}
    loss["perplexity"] = {"before": 10.96, "after": 24.4}
    files = report_pages(json.loads(files["report.json"]) | {"loss": loss})
    page = files["report.html"]
    assert drawn(page, "rect") == 3 * len(plan.layers)  # of each layer two errors and its share
    assert drawn(page, "circle") == len(plan.layers)  # the chosen rank
    assert drawn(page, "polyline") == len(plan.layers)
    for outside in (b"<script", b"src=", b"href=", b"url(", b"@import"):
        assert outside not in page
    assert b"prefers-color-scheme:dark" in page
    assert b"24.40" in page


def test_json_holds_every_layer_rule_and_note(plan: Plan) -> None:
    data = json.loads(report_files(plan, records(plan), FACTS)["report.json"])
    assert len(data["layers"]) == len(plan.layers) == 24
    assert [kept["type"] for kept in data["kept"]] == ["v_proj"] * 4
    assert all("recipe: uniform share of cf 2" in layer["rule"] for layer in data["layers"])
    assert data["layers"][0]["notes"] == ["jitter <raised>"]
    assert any("7 blocks do not divide" in note for note in data["notes"])
    assert data["totals"]["cf"] == pytest.approx(2.0, rel=0.01)
    assert "curve" not in data["layers"][0]


def test_without_calibration_there_is_no_spectrum_and_nothing_is_invented(plan: Plan) -> None:
    page = report_files(plan, records(plan), FACTS)["report.html"]
    assert drawn(page, "polyline") == 0
    assert b"Perplexity" not in page
    assert b"output error" not in page
    assert b"jitter &lt;raised&gt;" in page


@pytest.mark.parametrize("curve", [[0.0] * 5, [float("nan"), 1.0, 0.5], [1.0], [1e-300, 0.0]])
def test_odd_numbers_do_not_break_the_page(plan: Plan, curve: list[float]) -> None:
    files = report_files(plan, records(plan, curve=curve, weighted_error=float("inf")), FACTS)
    drawn(files["report.html"], "svg")
    json.loads(files["report.json"])


def test_long_curves_are_thinned_with_both_ends() -> None:
    thin = thin_curve([1000.0 - n for n in range(1000)])
    assert len(thin) == 256
    assert (thin[0], thin[-1]) == (1000.0, 1.0)
    assert thin_curve([3.0, 2.0]) == [3.0, 2.0]


@pytest.mark.parametrize("points", [[(0.0, 1.0)], [(1.0, 2.0), (1.0, 2.0)], [(0.0, 0.0), (5.0, 1e-9)]])
def test_degenerate_charts_are_drawn(points: list[tuple[float, float]]) -> None:
    ElementTree.fromstring(chart([Series("s", points)], "x", "y"))


def test_the_report_of_an_earlier_version_is_drawn_again() -> None:
    """As healing its output does; it has no bits."""
    with tarfile.open(Path(__file__).parents[1] / "data" / "outputs-0.1.0.tar.xz") as archive:
        file = archive.extractfile("svd/report.json")
        assert file is not None
        data = json.load(file)
    assert "bits" not in data["totals"]
    page = report_html(data)
    assert "–" in page and data["layers"][0]["module"] in page


def test_pictures_and_tables_are_made_from_their_figures() -> None:
    """And every figure stands in the tables that say how it was measured."""
    spec = spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    figures = module_from_spec(spec)
    spec.loader.exec_module(figures)
    tables = "".join(path.read_text("utf-8") for path in (ROOT / "scripts" / "log").glob("*.md"))
    readme, results = ((ROOT / name).read_text("utf-8") for name in ("README.md", "scripts/RESULTS.md"))
    for path, figure in figures.figures().items():
        assert path.with_suffix(".svg").read_text("utf-8") == figures.drawn(figure)
        assert f"figures/{path.stem}.svg)" in readme + results
        for group in figure["groups"]:
            values = [group["dense"], *group["values"].values()]
            assert [v for v in values if not re.search(rf"\b{v:g}0?\b", tables)] == []
    assert readme == figures.with_table(readme)
    said = re.findall(r"\d*\.\d+", figures.table())
    assert len(said) > 15 and [v for v in said if v not in tables or v not in results] == []


def test_errors_of_outputs_come_before_those_of_weights(plan: Plan) -> None:
    """Which are larger where a text is known: by them calibration would look harmful."""
    page = report_files(plan, records(plan, weighted_error=0.0512), FACTS)["report.html"].decode()
    assert page.index("error of the layer outputs<") < page.index("error of the weights<")
    table = page[page.index("<h2>Plan</h2>") :]
    assert "output error" in table and "0.0512" in table and "weight error" not in table
    alone = report_files(plan, records(plan), FACTS)["report.html"].decode()
    assert "weight error" in alone[alone.index("<h2>Plan</h2>") :]
