"""All that a healing trains is written, also what a checkpoint keeps under other names, or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heal_models import QUIET, compress_pico, save_characters, write_text
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.heal import heal
from blr.compressor.healing.state import State
from blr.compressor.healing.summary import HealSummary
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import HealOptions

SHORT = {"window": 16, "batch": 128, "steps": 20, "rate": 0.02, "device": "cpu", "check": False}
STILL = {"steps": 1, "rate": 1e-9}  # judges what it is given
SPARSE = ("factors", "norms", "biases", "dense")


def run(student: Path, teacher: Path, output: Path, **options: Any) -> HealSummary:
    return heal(student, teacher, output, HealOptions("c", "d", **{**SHORT, **options}), QUIET)


def old_bert(folder: Path) -> Path:
    """An encoder whose norms are called as in the first BERT."""
    path = save_pico("bert", folder) / "model.safetensors"
    tensors = load_file(path)
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norms called gamma and beta": (old_bert, {}),
    "experts one by one": (lambda folder: save_pico("mixtral", folder), {"train": SPARSE, "mix": 0.0}),
    "experts and gates": (lambda folder: save_pico("qwen3-moe", folder), {"train": SPARSE, "mix": 0.0}),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_as_good_as_said(name: str, tmp_path: Path) -> None:
    make, options = MODELS[name]
    dense = make(tmp_path / "dense")
    save_characters(dense)
    student = compress_pico(dense, tmp_path / "student", "svd")
    if options:
        text = write_text(tmp_path / "text.txt")
    else:
        text = tmp_path / "text.txt"
        text.write_text("\n".join(chr(97 + n % 26) * (1 + n % 3) + chr(97 + n % 7) for n in range(80)))
    given = {"data": (str(text),), **options}
    said = run(student, dense, tmp_path / "healed", **given)
    (before,), (after,) = said.before.values(), said.after.values()
    assert said.best_step and before != after
    (judged,) = run(tmp_path / "healed", dense, tmp_path / "again", **given, **STILL).before.values()
    assert judged == pytest.approx(after, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_dense_layers_in_few_bits_are_factors(kind: str, tmp_path: Path) -> None:
    dense = save_pico("llama-tied", tmp_path / "dense")
    save_characters(dense)
    student = tmp_path / "student"
    compress(
        dense, Recipe(method="dense", quantize=kind), student, Settings("dense", check=False), QUIET
    )
    options = {"data": (str(write_text(tmp_path / "text.txt")),), "mix": 0.0, "train": ("factors",)}
    said = run(student, dense, tmp_path / "healed", **options)
    weights = load_file(student / "model.safetensors").values()
    assert said.parameters > 0.5 * sum(weight.numel() for weight in weights if weight.dim() == 2)


def test_a_text_under_another_name_goes_on() -> None:
    """A resumed run takes texts by what is in them."""
    held = {"self": {"kl": 1.0}, "text.txt": {"kl": 2.0}}  # sorted, as files keep it
    for texts, names in ((["text.txt", "self"], ["new.txt", "self"]), ([], ["text.txt", "self"])):
        log: list[Any] = [{"held": dict(held)}, {"loss": 1.0}]
        state = State(before=dict(held), best_merits=dict(held), log=log, texts=texts)
        state.rename(names)
        expected = {names[0]: {"kl": 2.0}, "self": {"kl": 1.0}}
        assert state.before == state.best_merits == state.log[0]["held"] == expected
        assert list(state.before) == state.texts == names


def test_names_that_are_no_text_are_told_as_such(tmp_path: Path) -> None:
    dense = save_pico("llama-tied", tmp_path / "dense")
    save_characters(dense)
    student = compress_pico(dense, tmp_path / "student", "svd")
    text = write_text(tmp_path / "t.txt").rename(tmp_path / "t\udcff.txt")
    run(student, dense, tmp_path / "healed", data=(str(text),), mix=0.0, steps=2)
    assert "t\\udcff.txt" in (tmp_path / "healed/README.md").read_text()
