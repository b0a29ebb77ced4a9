"""The last pass of a fit: better distributions, none without room or logits, resumed without work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import block_model, calibration, run
from heal_models import save_characters
from pico import save_pico
from running import Invoke
from torch import nn

from blr.compressor.base.errors import CapabilityError
from blr.compressor.fitting import refit
from blr.compressor.fitting.block_passes import run_block
from blr.compressor.fitting.student import FitRun

PACKED = {"method": "svd", "rank": 4, "base": "int2", "group": 32}


def divergence(found: FitRun) -> float:
    """KL of the dense model's distributions from those of the stored results, nats a token."""
    blocks, total = nn.ModuleList([student.block for student in found.students]), 0.0
    starts = found.model.start(calibration())
    with torch.no_grad():
        for start, end in zip(starts, found.batches, strict=True):
            mine = found.model.logits(run_block(blocks, start.hidden, start)).log_softmax(-1)
            dense = found.model.logits(end.hidden).log_softmax(-1)
            total += float((dense.exp() * (dense - mine)).sum(-1).mean()) / len(starts)
    return total


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("settings", "share"), [(PACKED, 1.0), ({"method": "svd", "cf": 2.0}, 0.9)], ids=["packed", "plain"]
)
def test_it_comes_nearer_to_the_dense_models_distributions(
    name: str, settings: dict[str, Any], share: float, tmp_path: Path
) -> None:
    """Packed weights of a model that was never trained have nothing to gain; they must not lose."""
    folder = save_pico(name, tmp_path / name)
    found = run(folder, tmp_path / "journal", finish=12, **settings)
    (before, after) = next(iter(found.results.values()))[1]["finish"]
    assert after <= share * before
    assert divergence(found) == pytest.approx(after, rel=0.1)  # as it is stored, in bfloat16


def test_a_resumed_run_trains_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_pico("llama", tmp_path / "model")
    first = run(folder, tmp_path / "journal", epochs=1, finish=1, **PACKED)
    monkeypatch.setattr(refit, "Finishing", lambda *_: pytest.fail("computed again"))
    second = run(folder, tmp_path / "journal", epochs=1, finish=1, **PACKED)
    assert first.results == second.results
    assert first.norms == second.norms


def test_who_has_no_logits_or_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    for name in ("bert", "llama"):
        model = block_model(name, tmp_path / name)
        batches = model.start(calibration())
        assert refit.finish_epochs(None, 4, model, batches) == 0  # on a CPU
        if name == "llama":
            assert refit.finish_epochs(3, 4, model, batches) == 3
        monkeypatch.setattr(refit, "_room", lambda _: 1.0)
        message = "predicts tokens" if name == "bert" else "GB"
        with pytest.raises(CapabilityError, match=message):
            refit.finish_epochs(3, 4, model, batches)
        monkeypatch.undo()


def test_it_is_refused_before_anything_is_measured(tmp_path: Path, invoke: Invoke) -> None:
    """What is kept of a run that cannot be is in the way of one that can."""
    save_characters(save_pico("bert", tmp_path / "model"))
    settings = tmp_path / "model/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "a"}))
    (tmp_path / "text.txt").write_text("".join(f"{'abc' * n}\n" for n in range(1, 9)))
    text = ("--calibration", tmp_path / "text.txt", "--device", "cpu")
    out = tmp_path / "out"
    code, _, said = invoke("compress", tmp_path / "model", "-o", out, *text, "--finish", 1)
    assert code == 9, said
    assert "--finish is for a model that predicts tokens; leave it out" in said
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]
