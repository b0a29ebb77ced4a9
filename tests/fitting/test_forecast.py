"""What compressing is predicted to take, against what was measured (scripts/LOG.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blr.compressor.fitting.forecast import forecast, words
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.recipe.schema import Recipe

H200 = find_gpu("h200")
LAYER = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096},
    **{
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
}
SECONDS = {"q_proj": 5.9, "gate_proj": 12.0, "down_proj": 19.5}  # of an 8B layer
GIB = {"q_proj": 1.7, "up_proj": 2.9, "down_proj": 5.0}  # of a 7B layer


def layers(folder: Path, recipe: Recipe, **changed: int) -> Any:
    (folder / "config.json").write_text(json.dumps(LAYER | changed))
    return make_plan(open_or_outline(folder)[0], recipe, calibrated=True).layers


def test_a_layer_takes_what_was_measured(tmp_path: Path) -> None:
    recipe = Recipe(method="blast", blocks=16, cf=2, samples=1, refit=0)
    for layer in layers(tmp_path, recipe, intermediate_size=14336):
        if (seconds := SECONDS.get(layer.layer.type)) is not None:
            found = forecast([layer], recipe, H200, 1, calibrated=True)
            predicted = found.seconds
            assert predicted == pytest.approx(seconds, rel=0.4), layer.layer.module
    for layer in layers(tmp_path, recipe):
        if (memory := GIB.get(layer.layer.type)) is not None:
            found = forecast([layer], recipe, H200, 1, calibrated=True)
            assert memory * 2**30 * 0.8 < found.memory < memory * 2**30 * 2, layer.layer.module


@pytest.mark.parametrize("calibrated", [False, True])
def test_gpus_share_the_work(calibrated: bool, tmp_path: Path) -> None:
    recipe = Recipe(method="svd", cf=2)
    found = layers(tmp_path, recipe)
    one, two = (forecast(found, recipe, H200, n, calibrated) for n in (1, 2))
    alone, together = one.seconds, two.seconds  # predicted ones
    assert alone / 2 < together < alone
    assert "of each of 2 h200" in words(two, "h200") and "each" not in words(one, "h200")
