"""The card of an output says how the model in it is loaded, head and all, through both doors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exporting import compress_to, export_to
from heal_models import save_dense, write_text
from pico import MODELS, MORE, inputs_for, save_model

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.inspect import inspect_output, inspect_text
from blr.compressor.recipe.schema import make_recipe

register()

pytestmark = pytest.mark.fast

TEACHER = "DeiTForImageClassificationWithTeacher"
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForTokenClassification": ("BertConfig", MODELS["bert"][1], "AutoModelForTokenClassification"),
    "BertModel": ("BertConfig", MODELS["bert"][1], "AutoModel"),
    "GPT2LMHeadModel": ("GPT2Config", MODELS["gpt2"][1], "AutoModelForCausalLM"),
    "T5ForConditionalGeneration": ("T5Config", MORE["t5"][1], "AutoModelForSeq2SeqLM"),
    "T5EncoderModel": ("T5Config", MORE["t5"][1], "AutoModelForTextEncoding"),
    # one of two classes that its Auto class gives
    TEACHER: ("DeiTConfig", MODELS["vit"][1], "AutoModelForImageClassification"),
}


def named(folder: Path) -> set[str]:
    """The Auto classes of transformers that the card of `folder` names."""
    return set(re.findall(r"AutoModel\w*", (folder / "README.md").read_text()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [None, "folder", "plain"])
@pytest.mark.parametrize("name", KINDS)
def test_what_the_card_names_loads_the_model_that_was_compressed(
    name: str, kind: str | None, tmp_path: Path
) -> None:
    config, settings, auto = KINDS[name]
    save_model(config, settings, name, tmp_path / "dense")
    output = compress_to(tmp_path / "dense", tmp_path / "out", method="svd", cf=1.5)
    if kind is not None:
        output = export_to(output, tmp_path / "exported", kind=kind)
    assert named(output) == {auto}
    described = json.loads((output / "config.json").read_bytes())
    assert described["architectures"] == [f"Blr{name}"]
    assert described["auto_map"][auto].endswith(f".Blr{name}")  # what remote code is asked for
    if kind != "plain":
        model = getattr(transformers, auto).from_pretrained(output)
        assert type(model).__name__ == f"Blr{name}"


def test_a_model_that_is_saved_is_asked_for_by_its_own_class(tmp_path: Path) -> None:
    """Of two that one Auto class gives: by remote code it would be the other, with a new head."""
    config, settings, auto = KINDS[TEACHER]
    save_model(config, settings, TEACHER, tmp_path / "dense")
    output = compress_to(tmp_path / "dense", tmp_path / "out", method="svd", cf=1.5)
    model = getattr(transformers, auto).from_pretrained(output)
    model.save_pretrained(tmp_path / "saved")
    described = json.loads((tmp_path / "saved" / "config.json").read_bytes())
    assert described["auto_map"][auto] == f"modeling_blr.Blr{TEACHER}"
    with torch.no_grad():
        again = getattr(transformers, auto).from_pretrained(tmp_path / "saved")
        found, expected = (m.eval()(**inputs_for(m)).logits for m in (again, model))
    assert torch.equal(found, expected)


def test_a_cache_of_ranks_is_told_with_its_size(tmp_path: Path) -> None:
    save_model(*MODELS["llama"], tmp_path / "dense")
    settings = {"ranks": {"kv_cf": 2.0}, "whole": {"method": "svd", "cf": 1.5}}
    cards = {
        kind: (compress_to(tmp_path / "dense", tmp_path / kind, **given) / "README.md").read_text()
        for kind, given in settings.items()
    }
    assert (
        "the cache of keys and values: 2.00 times smaller, 256 -> 128 bytes a token." in cards["ranks"]
    )
    assert "cache" not in cards["whole"]


def test_a_calibrated_output_tells_errors_of_outputs(tmp_path: Path) -> None:
    """In the card and by inspect: those of weights grow where a fit knows what layers read."""
    dense, text = save_dense(tmp_path / "dense"), write_text(tmp_path / "text.txt")
    recipe = make_recipe(method="svd", cf=1.5, samples=8)
    settings = Settings("dense", calibration=str(text), device="cpu")
    compress(dense, recipe, tmp_path / "out", settings, Progress(quiet=True))
    found = inspect_output(tmp_path / "out")
    rows = {row["module"]: row for row in found["layers"]}
    row = rows["model.layers.0.mlp.down_proj"]
    assert 0 < row["output_error"] < row["error"]
    said = inspect_text(found)
    assert "error of outputs" in said and f"{row['output_error']:.4f}" in said
    assert f"{row['error']:.4f}" not in next(x for x in said.splitlines() if row["module"] in x)
    card = (tmp_path / "out/README.md").read_text()
    assert "mean relative error of the outputs" in card and "error of the weights" not in card
    mean = sum(r["output_error"] for r in rows.values() if r["type"] == "down_proj")
    count = sum(r["type"] == "down_proj" for r in rows.values())
    assert f"| {mean / count:.4f} |" in card
    compress_to(dense, tmp_path / "plain", method="svd", cf=1.5)
    assert "error of weights" in inspect_text(inspect_output(tmp_path / "plain"))
