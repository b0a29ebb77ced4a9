"""What a folder holds besides weights comes along; the card keeps what the source says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.checkpoint.manifest import read_manifest, verify_files
from blr.compressor.compress import Settings, compress
from blr.compressor.errors import InputError
from blr.compressor.output.front import card_front, source_front
from blr.compressor.progress import Progress
from blr.compressor.recipe.schema import make_recipe

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
