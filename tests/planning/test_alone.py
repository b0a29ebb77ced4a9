"""`quantize` alone means the dense weights; beside a structure or a size, the factors of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Invoke

from blr.compressor.loading.resolve import default_output
from blr.compressor.recipe.chosen import load_recipe
from blr.compressor.recipe.schema import Recipe, make_recipe

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group": 32},
        {"exclude": ["*.v_proj"], "seed": 3},
        {"samples": 64, "cf": None, "base": "none"},
        {"rules": [{"match": "*.v_proj", "quantize": "int8"}, {"match": "*.k_proj", "method": "dense"}]},
    ],
)
def test_alone_it_stores_dense_weights(settings: dict[str, Any]) -> None:
    settings = {name: value for name, value in settings.items() if name != "cf"}
    recipe = make_recipe(quantize="int4", **settings)
    assert recipe.method == "dense" and recipe.own().stored.bits == 4 and not recipe.sized_by_cf
    assert default_output("models/tiny", recipe) == Path("tiny-dense-int4")


@pytest.mark.parametrize(
    "settings",
    [
        {"cf": 2.0},
        {"rank": 8},
        {"method": "svd"},
        {"heads": "auto"},
        {"base": "int3", "bpw": 3.5},
        {"rules": [{"match": "*.v_proj", "rank": 8}]},
        {"method": "blast", "blocks": 4},
    ],
)
def test_beside_a_structure_or_a_size_it_is_of_the_factors(settings: dict[str, Any]) -> None:
    recipe = make_recipe(quantize="int4", **settings)
    assert recipe.method == settings.get("method", "svd") and recipe.own().stored.bits == 4


def test_without_it_the_default_is_as_it_was() -> None:
    assert (Recipe().method, Recipe().cf) == ("svd", 2.0)
    assert make_recipe(quantize="none").method == "svd"


def test_a_recipe_file_that_names_a_structure_or_a_size_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text, method in (("cf: 1.5", "svd"), ("method: blast", "blast"), ("seed: 3", "dense")):
        path.write_text(text)
        assert load_recipe(path, {"quantize": "int4"}).method == method
    path.write_text("quantize: int4\ngroup: 64")
    assert load_recipe(path).method == "dense" and load_recipe(path, {"cf": 2.0}).method == "svd"


def test_plan_and_compress_say_so(tiny: Path, tmp_path: Path, invoke: Invoke) -> None:
    code, out, err = invoke("plan", tiny, "--quantize", "int4", "--format", "json")
    assert code == 0, err
    assert {row["structure"] for row in json.loads(out)["layers"]} == {"dense"}
    given = ("compress", tiny, "--quantize", "int4", "-o", tmp_path / "out", "-q", "--device", "cpu")
    code, out, err = invoke(*given, "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert found["method"] == "dense" and found["check"]["loss"] < 0.25
