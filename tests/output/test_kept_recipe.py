"""The recipe that lies beside an output is one that makes it again."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from blr.compressor.output.files import _written
from blr.compressor.recipe.schema import make_recipe

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "given",
    [
        {"method": "dense", "quantize": "int4", "group": 64},
        {"method": "svd", "base": "int3", "rank": 16},
        {"method": "blast", "base": "int2", "bpw": 2.5},
        {"method": "dense", "kv_cf": 2.0, "kv_quantize": "int8"},
        {"method": "svd", "tokens_per_second": 700.0, "gpu": "h200"},
        {"method": "svd", "cf": 3.0, "rules": [{"match": "*.down_proj", "method": "dense"}]},
        {"method": "blast", "blocks": 4},
        {"method": "svd", "rank": 8},
        {},
    ],
)
def test_it_reads_back_as_it_was(given: dict[str, Any]) -> None:
    recipe = make_recipe(**given)
    written = yaml.safe_load(yaml.safe_dump(_written(recipe)))
    again = make_recipe(**written)
    assert again == recipe
    by_cf = recipe.sized_by_cf and recipe.tokens_per_second is None
    assert written["method"] == recipe.method and ("cf" in written) is by_cf
    assert _written(again) == _written(recipe)
