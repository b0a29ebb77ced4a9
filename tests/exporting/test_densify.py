"""Layers that the table of the GPU says to run dense are exported dense, with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import Invoke
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.recipe.tuned_table import table_text, user_table, write_table
from blr.kernels.common import tables

register()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's table in which attention-sized layers are faster dense, others are not."""
    names = ("lowrank", "monarch", "blast", "kronecker")
    rules = [{"structure": s, "features": [1, 192], "n": [1, 8], "variant": "dense"} for s in names]
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path / "tuned"))
    write_table(user_table("h200"), table_text("h200", "a test", rules))
    tables.forget()
    yield
    monkeypatch.undo()
    tables.forget()


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
def test_layers_that_are_faster_dense_become_dense(
    method: str, sources: dict[str, Path], tmp_path: Path, invoke: Invoke, table: None
) -> None:
    output = tmp_path / "export"
    arguments = (sources[method], "-o", output, "--gpu", "h200", "--batch", 2, "--context", 64, "-q")
    code, out, err = invoke("export", *arguments, "--format", "json")
    assert code == 0, err
    before = json.loads((sources[method] / "config.json").read_text())["blr"]["layers"]
    after = json.loads((output / "config.json").read_text())["blr"]["layers"]
    small = {m for m, s in before.items() if max(s["in_features"], s["out_features"]) <= 192}
    assert small and set(before) - set(after) == small
    assert json.loads(out)["densified"] == len(small)
    ids = torch.arange(40, 60)[None]
    found, wanted = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits.double()
        for f in (output, sources[method])
    )
    stored = json.loads((output / "config.json").read_text())["dtype"]  # the product is rounded to it
    assert (found - wanted).norm() <= TOLERANCES[getattr(torch, stored)] * wanted.norm()


def test_without_a_measurement_layers_stay_as_they_are(
    sources: dict[str, Path], exports: dict[str, Path]
) -> None:
    for name in ("svd", "blast"):
        tables = [
            json.loads((f[name] / "config.json").read_text())["blr"]["layers"]
            for f in (sources, exports)
        ]
        assert tables[0].keys() == tables[1].keys()
