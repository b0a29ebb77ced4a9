"""A factor of the whole model: the layers take what embeddings and heads leave of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Invoke

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.loading.resolve import default_output
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.sizing import sized
from blr.compressor.recipe.schema import Recipe, make_recipe
from configs import LARGE

pytestmark = pytest.mark.fast
KINDS: list[tuple[dict[str, Any], float]] = [
    ({}, 1.3),
    ({"method": "blast"}, 2.0),
    ({"method": "ks"}, 1.4),
    ({"quantize": "int4"}, 2.2),
    ({"rules": [{"match": "*layers.0.*", "method": "dense"}]}, 1.5),
]


@pytest.mark.parametrize(("settings", "wanted"), KINDS)
def test_the_whole_model_becomes_as_many_times_smaller(
    settings: dict[str, Any], wanted: float, tiny: Path
) -> None:
    """Also with layers in few bits, and with some that a rule keeps."""
    source = open_source(tiny)
    recipe, said = sized(source, Recipe(**settings, model_cf=wanted), False)
    assert recipe.model_cf is None and f"--model-cf {wanted:g}: --cf {recipe.cf:g}" in said
    plan = make_plan(source, recipe)
    replaced = sum(layer.layer.entry.nbytes for layer in plan.layers)
    after = source.nbytes - replaced + sum(layer.bits for layer in plan.layers) / 8
    assert abs(source.nbytes / after / wanted - 1) <= 0.01


def test_what_comes_out_is_as_small_and_its_recipe_repeats_it(
    tiny: Path, tmp_path: Path, invoke: Invoke
) -> None:
    given = ("compress", tiny, "--device", "cpu", "--force", "-q", "--format", "json")
    code, out, err = invoke(*given, "--model-cf", 1.5, "-o", tmp_path / "out")
    assert code == 0, err
    assert abs(json.loads(out)["factor"] / 1.5 - 1) <= 0.02  # in files, which have headers
    code, again, err = invoke(*given, "-r", tmp_path / "out/recipe.yaml", "-o", tmp_path / "again")
    assert code == 0 and json.loads(again)["factor"] == json.loads(out)["factor"], err
    assert default_output("some", Recipe(model_cf=1.5)).name == "some-svd-model-cf1.5"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_cf": 5.0}, "embeddings, head and what else stays dense take"),
        ({"model_cf": 2.99}, "asks for --cf"),
        ({"model_cf": 1.05, "quantize": "int4", "group": 32}, "the nearest gives"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str, tiny: Path) -> None:
    """More than the embeddings leave, more than rank 1 gives, less than few bits give by themselves."""
    with pytest.raises(UsageError, match=f"--model-cf .*{said}"):
        sized(open_source(tiny), Recipe(**settings), False)


def test_without_weights_no_size_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    with pytest.raises(UsageError, match=r"config\.json alone"):
        sized(open_or_outline(tmp_path)[0], Recipe(model_cf=2.0), False)


@pytest.mark.parametrize(
    "beside",
    [{"cf": 3.0}, {"rank": 4}, {"base": "int2", "rank": 4}, {"method": "dense", "quantize": "int4"}],
)
def test_only_one_size_is_taken(beside: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="model_cf"):
        make_recipe(model_cf=2.0, **beside)
