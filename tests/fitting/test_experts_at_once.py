"""Experts that are fitted by the same launches, as a GPU does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fresh import blr
from heal_models import save_characters, write_text
from pico import save_pico

from blr.compressor.fitting import sequential
from blr.compressor.workspace.journal import Journal

METHODS = {
    "few bits": ("--method", "dense", "--quantize", "int3"),
    "corrected": ("--method", "svd", "--base", "int2", "--rank", 4),
}


@pytest.mark.parametrize("method", METHODS)
def test_they_are_fitted_as_one_by_one(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are those of fits one after the other; a run that is killed among them ends with the same
    bytes."""
    source = save_pico("mixtral", tmp_path / "dense")
    save_characters(source)
    text = write_text(tmp_path / "text.txt", 6000)
    sizes = ("--seq-len", 32, "--samples", 16, "--refit", 0, "--group", 32, "--force")
    asked = ("compress", source, "--text", text, *METHODS[method], *sizes)
    errors = []
    for at_once in (1, 3):
        monkeypatch.setattr(sequential, "ON_CPU", at_once)
        output = tmp_path / str(at_once)
        blr(*asked, "-o", output)
        report = json.loads((output / "report.json").read_text())
        errors.append({layer["module"]: layer["error"] for layer in report["layers"]})
    assert errors[0] == pytest.approx(errors[1], rel=1e-2)
    stored, left = Journal.store, iter(range(11))

    def killed(journal: Journal, *arguments: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        stored(journal, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "store", killed)
        with pytest.raises(RuntimeError):
            blr(*asked, "-o", tmp_path / "killed")
    assert "resumed with" in blr(*asked, "-o", tmp_path / "killed").err
    name = "model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (output / name).read_bytes()
