"""What a folder holds besides weights comes along; the card keeps what the source says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from exporting import compress_to, export_to
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.base.errors import InputError
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.output.card import card_front, read_front, source_front, write_front
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.workspace.manifest import read_manifest, verify_files

CARD = """---
license: llama3.2
license_name: the community's
base_model: someone/base
language: [en, de]
pipeline_tag: feature-extraction
library_name: sentence-transformers
tags: [embedding, blr]
widget: [{text: not ours to repeat}]
---
# A model

![plot](images/plot.png)
"""
FILES = {
    "README.md": CARD.encode(),
    "LICENSE": b"the licence",
    "USE_POLICY.md": b"the policy",
    "images/plot.png": b"\x89PNG",
    "processor.json": b'{"auto_map": {"AutoProcessor": "evil.P"}, "size": 3}',
    "modules.json": b'[{"path": ""}, {"path": "2_Dense"}]',
    "2_Dense/config.json": b'{"in_features": 32}',
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder with all that one may have beside its weights."""
    folder = save_pico("bert", tmp_path_factory.mktemp("carried") / "source")
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    save_file({"linear.weight": torch.eye(32)}, folder / "2_Dense" / "model.safetensors")
    return folder


def check(output: Path, card: str) -> None:
    """Files byte for byte, without hints of code; the card of the source under a name of its own."""
    same = FILES.keys() - {"README.md", "processor.json"}
    assert {name: (output / name).read_bytes() for name in same} == {n: FILES[n] for n in same}
    assert (output / "README.source.md").read_bytes() == FILES["README.md"]
    assert b"evil" not in (output / "processor.json").read_bytes()
    assert load_file(output / "2_Dense" / "model.safetensors")["linear.weight"].equal(torch.eye(32))
    front = source_front(output)
    assert {key: front[key] for key in front.keys() - {"tags", "base_model"}} == {
        **{"license": "llama3.2", "license_name": "the community's", "language": ["en", "de"]},
        **{"pipeline_tag": "feature-extraction", "library_name": "sentence-transformers"},
    }
    assert front["base_model"] == ["someone/base"] and front["tags"][:2] == ["embedding", "blr"]
    assert card in (output / "README.md").read_text()
    assert verify_files(output, read_manifest(output)) == []


def test_every_output_takes_them_along(source: Path, tmp_path: Path) -> None:
    compressed = compress_to(source, tmp_path / "out", method="svd", cf=1.5)
    check(compressed, "compressed by blr")
    assert source_front(compressed)["tags"][2:] == ["structured-compression", "svd"]
    check(export_to(compressed, tmp_path / "export"), "Exported for")
    check(export_to(compressed, tmp_path / "dense", kind="dense"), "made dense by blr")
    check(export_to(source, tmp_path / "plain"), "exported by blr")


def test_pickled_weights_of_a_module_are_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    copy = save_pico("bert", tmp_path / "source")
    (copy / "modules.json").write_bytes(FILES["modules.json"])
    (copy / "2_Dense").mkdir()
    torch.save({"linear.weight": torch.eye(32)}, copy / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"2_Dense.pytorch_model\.bin: found only pickled .*--allow-p"):
        compress_to(copy, tmp_path / "out", method="svd", cf=1.5)
    recipe, settings = make_recipe(method="svd", cf=1.5), Settings("source", allow_pickle=True)
    compress(copy, recipe, tmp_path / "out", settings, Progress(quiet=True))
    stored = load_file(tmp_path / "out" / "2_Dense" / "model.safetensors")
    assert stored["linear.weight"].equal(torch.eye(32))


# A source's card -> the lines of the front of ours.
FRONTS = {
    "none": (None, ["library_name: transformers", "tags:", "- mine"]),
    "no front": ("# A model\n", ["library_name: transformers", "tags:", "- mine"]),
    "no YAML": ("---\na: [\n---\n", ["library_name: transformers", "tags:", "- mine"]),
    "an object": ("---\nlicense: !!python/name:os.system\n---\n", ["library_name: transformers"]),
    "no text": ("---\nlicense: {a: b}\ntags: [1]\n---\n", ["library_name: transformers", "- mine"]),
    "a text for a list": ("---\ntags: one\n---\n", ["tags:", "- one", "- mine"]),
    "a fence in a text": ('---\nlicense: "a\\n---\\nb"\n---\n', ["library_name: transformers"]),
}


@pytest.mark.parametrize("kind", FRONTS)
def test_the_front_of_a_card_is_plain(kind: str, tmp_path: Path) -> None:
    card, lines = FRONTS[kind]
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    front = card_front(tmp_path, "name", ("mine",))
    assert front.startswith("---\n") and front.endswith("\n---\n")
    assert set(lines) <= set(front.splitlines()) and "python" not in front
    assert front.count("\n---\n") == 1 and "base_model" not in front
    assert "base_model:\n- owner/name\n" in card_front(tmp_path, "owner/name", ("mine",))


# What YAML 1.1, by which the hub reads cards, takes for booleans, numbers, dates, nothing or worse
WORDS = (
    *("no", "No", "on", "OFF", "y", "N", "yes", "true", "null", "~", "", "12:30", "1:2:3.5", "012"),
    *("0x1f", "0b11", "1_000", "+1", "-.inf", ".5", ".nan", "1e3", "1.5e3", "2024-01-01", "<<", "="),
    *("- x", "a: b", "a #b", " a", "a ", "x\ny", "\u00e9", "!x", "&a", "*b", "%d", "@x", "`x`", "[a]"),
)


@pytest.mark.parametrize("word", WORDS)
def test_words_of_a_card_stay_words_for_the_hub(word: str, tmp_path: Path) -> None:
    front = {"language": word, "tags": ["en", word], word or "key": {"deep": [word]}}
    text = write_front(front)
    assert yaml.safe_load(text.split("---\n")[1]) == front
    assert read_front(text, tmp_path) == (front, "")


@pytest.mark.parametrize(
    "number", [1e-5, 1e22, -2.5e-7, 0.5, 3, float("inf"), -float("inf"), True, None]
)
def test_figures_of_a_card_stay_figures_for_the_hub(number: object, tmp_path: Path) -> None:
    text = write_front({"value": number})
    assert yaml.safe_load(text.split("---\n")[1]) == {"value": number}
    assert read_front(text, tmp_path)[0] == {"value": number}


HEADS = {
    "---\nlicense: mit\n---": ("mit", ""),
    "---\nlicense: mit\n---\n": ("mit", ""),
    "---\nlicense: mit\n---\n# A model": ("mit", "# A model"),
    "---\nlicense: mit\n--- \n# A model": ("mit", "# A model"),
    "\n\n---\nlicense: mit\n---\nx": ("mit", "x"),
    "---\nlicense: mit\n": (None, "---\nlicense: mit\n"),
    "---\nlicense: mit\n----\n": (None, "---\nlicense: mit\n----\n"),
    "---\n---\nx": (None, "x"),
    "# A model\n---\nlicense: mit\n---\n": (None, "# A model\n---\nlicense: mit\n---\n"),
}


@pytest.mark.parametrize("text", HEADS)
def test_where_the_head_of_a_card_ends(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    found, body = read_front(text, tmp_path)
    assert (found.get("license"), body) == HEADS[text]
    assert source_front(tmp_path).get("license") == HEADS[text][0]
