"""What is trained in float8 is rounded for what the trained model reads, padding left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import QUIET, compress_pico, save_characters
from pico import save_pico
from safetensors.torch import load_file

from blr.compressor.commands.heal import heal
from blr.compressor.fitting.rounding import Metric
from blr.compressor.fitting.student import Twin
from blr.compressor.healing import trainer
from blr.compressor.healing.objective import PADDING, Objective
from blr.compressor.healing.output import metric_of, read_inputs
from blr.compressor.healing.student_and_teacher import load_pair, load_teacher
from blr.compressor.loading.load import load_model
from blr.compressor.loading.sentences import Sentences
from blr.compressor.recipe.settings import HealOptions

CPU = torch.device("cpu")


def test_tokens_are_read_and_padding_is_not(tmp_path: Path) -> None:
    encoder = save_pico("bert", tmp_path / "dense")
    save_characters(encoder)
    packed = compress_pico(encoder, tmp_path / "packed", "svd", quantize="fp8")
    pair = load_pair(packed, load_teacher(encoder, CPU, "AutoModel"), ("factors",), Sentences())
    short = torch.randint(5, 90, (6, 5))
    expected = read_inputs(pair, short)
    found = read_inputs(pair, torch.cat([short, torch.full((6, 3), PADDING)], 1))
    assert found.keys() == pair.twins.keys() == expected.keys()
    assert all(len(x) == short.numel() for x in found.values())
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])
    first = "encoder.layer.0.attention.self"
    assert found[f"{first}.query"].equal(found[f"{first}.value"])
    x = found[f"{first}.key"].double()
    torch.testing.assert_close(metric_of(found[f"{first}.key"], CPU).gram, x.mT @ x / len(x))


@pytest.mark.parametrize(
    ("name", "settings", "layer"),
    [("opt", {}, "model.decoder.layers.0.fc1"), ("llama", {"include": ["*"]}, "lm_head")],
)
def test_rows_of_tokens_and_heads_are_read(
    name: str, settings: dict[str, Any], layer: str, tmp_path: Path
) -> None:
    """Some layers are given tokens of all windows in a row; a head stands behind the base model."""
    dense = save_pico(name, tmp_path / "dense")
    packed = compress_pico(dense, tmp_path / "packed", "svd", quantize="fp8", **settings)
    pair = load_pair(packed, load_teacher(dense, CPU), ("factors",))
    ids = torch.cat([torch.randint(5, 90, (6, 5)), torch.full((6, 3), PADDING)], 1)
    found = read_inputs(pair, ids)
    assert found.keys() == pair.twins.keys() and layer in found
    assert {len(x) for x in found.values()} == {30}


@pytest.mark.parametrize(("kind", "group"), [("fp8", None), ("int8", 32)])
def test_healed_layers_are_rounded_in_the_metric_of_their_inputs(
    kind: str,
    group: int | None,
    dense: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integers are trained as they are rounded."""
    packed = compress_pico(dense, tmp_path / "packed", "svd", quantize=kind, group=group)
    given: list[Metric | None] = []
    plain = Twin.stored

    def spy(self: Twin, dtype: torch.dtype, metric: Metric | None = None) -> dict[str, torch.Tensor]:
        given.append(metric)
        return plain(self, dtype, metric)

    monkeypatch.setattr(Twin, "stored", spy)
    options = {"window": 16, "batch": 64, "steps": 20, "rate": 0.01, "device": "cpu", "mix": 0.0}
    asked = HealOptions("packed", "dense", data=(str(text),), **options)
    summary = heal(packed, dense, tmp_path / "out", asked, QUIET)
    layers = json.loads((packed / "config.json").read_text())["blr"]["layers"]
    assert len(given) == len(layers) and all((m is not None) == (kind == "fp8") for m in given)
    assert summary.after["text.txt"]["kl"] < summary.before["text.txt"]["kl"]
    before, after = (load_file(f / "model.safetensors") for f in (packed, tmp_path / "out"))
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    model = load_model(tmp_path / "out", "AutoModelForCausalLM", dtype="float32", device="cpu")
    assert bool(model(torch.randint(128, (1, 12))).logits.isfinite().all())


@pytest.mark.parametrize("rate", [0.01, 1e-5, 0.9])
def test_what_is_judged_is_what_is_written(
    rate: float, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rounding takes back what little was trained, and where nothing was better."""
    packed = compress_pico(dense, tmp_path / "packed", "svd", quantize="fp8")
    made: list[trainer.Trainer] = []
    plain = trainer.Trainer.run

    def spy(self: trainer.Trainer) -> trainer.State:
        made.append(self)
        return plain(self)

    monkeypatch.setattr(trainer.Trainer, "run", spy)
    options = {"window": 16, "batch": 64, "steps": 20, "rate": rate, "device": "cpu", "mix": 0.0}
    asked = HealOptions("packed", "dense", data=(str(text),), **options)
    summary = heal(packed, dense, tmp_path / "out", asked, QUIET)
    assert (summary.best_step == 0) == (rate == 0.9)
    if not summary.best_step:
        files = [(f / "model.safetensors").read_bytes() for f in (packed, tmp_path / "out")]
        assert files[0] == files[1] and summary.after == summary.before
    written = load_pair(tmp_path / "out", load_teacher(dense, CPU), ("factors",))
    parts = made[0].data.parts
    objective = Objective(written, asked, parts[0].stream.held[:1])
    found = objective.merit(parts[0].stream.held[: trainer.HELD_ON_CPU])
    assert summary.after["text.txt"]["kl"] == pytest.approx(found["kl"], abs=1e-6)
