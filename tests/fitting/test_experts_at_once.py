"""Experts that are fitted by the same launches, as a GPU does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh import blr
from heal_models import save_characters, write_text
from killing import killed_after
from pico import save_pico

from blr.compressor.fitting import sequential

METHODS = {
    "few bits": ("--method", "dense", "--quantize", "int3"),
    "corrected": ("--method", "svd", "--base", "int2", "--rank", 4),
}


@pytest.mark.parametrize("method", METHODS)
def test_they_are_fitted_as_one_by_one(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of fits one after the other, also of a run that is killed among them."""
    source = save_pico("mixtral", tmp_path / "dense")
    save_characters(source)
    text = write_text(tmp_path / "text.txt", 6000)
    sizes = ("--seq-len", 32, "--samples", 16, "--refit", 0, "--group", 32, "--force")
    asked = ("compress", source, "--text", text, *METHODS[method], *sizes)
    name, found = "model.safetensors", []
    for at_once in (1, 3):
        monkeypatch.setattr(sequential, "ON_CPU", at_once)
        blr(*asked, "-o", tmp_path / str(at_once))
        found.append((tmp_path / str(at_once) / name).read_bytes())
    assert found[0] == found[1]
    with killed_after(11):
        blr(*asked, "-o", tmp_path / "killed")
    assert "resumed with" in blr(*asked, "-o", tmp_path / "killed").err
    assert (tmp_path / "killed" / name).read_bytes() == found[0]
