"""`heal --lora`: additions are trained and merged, and what is merged computes what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import QUIET, compress_pico
from safetensors.torch import load_file

from blr.compressor.commands.heal import heal
from blr.compressor.commands.inspect import inspect_output
from blr.compressor.commands.push import prepare_push
from blr.compressor.healing.trained_parameters import (
    add_products,
    attach,
    extended,
    growth,
    product_of,
    raised,
)
from blr.compressor.loading.load import load_model
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import LowRankSpec
from blr.compressor.text import own
from blr.compressor.workspace.manifest import read_manifest, verify_files

OPTIONS = HealOptions(
    "c", "d", window=16, batch=64, own_tokens=400, steps=30, rate=0.03, device="cpu", lora=2
)
DECODER = "AutoModelForCausalLM"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "CPU_BATCH", 8)


@pytest.mark.parametrize("method", ["svd", "blast", "monarch"])
def test_what_is_written_is_what_was_trained(method: str, dense: Path, tmp_path: Path) -> None:
    smaller = compress_pico(dense, tmp_path / "compressed", method, exclude=["*.k_proj"])
    summary = heal(smaller, dense, tmp_path / "out", OPTIONS, QUIET)
    assert summary is not None and summary.after["self"]["kl"] < 0.98 * summary.before["self"]["kl"]
    output = tmp_path / "out"
    assert verify_files(output, read_manifest(output)) == []
    again = heal(output, dense, tmp_path / "again", HealOptions(**{**vars(OPTIONS), "steps": 1}), QUIET)
    assert again is not None  # the loss before is that of what was read
    assert again.before["self"]["kl"] == pytest.approx(summary.after["self"]["kl"], rel=0.02)
    before, after = (load_file(f / "model.safetensors") for f in (smaller, output))
    grown = 0 if method == "monarch" else 2
    name = "model.layers.0.mlp.up_proj.U"
    assert after[name].shape[-1] == before[name].shape[-1] + grown
    if grown:
        torch.testing.assert_close(after[name][..., :-grown], before[name])
    kept = "model.layers.0.self_attn.k_proj.weight"
    assert after[kept].shape == before[kept].shape and not torch.equal(after[kept], before[kept])


def test_report_and_records_have_the_raised_ranks(compressed: Path, dense: Path, tmp_path: Path) -> None:
    heal(compressed, dense, tmp_path / "out", OPTIONS, QUIET)
    old, new = (json.loads((f / "report.json").read_text()) for f in (compressed, tmp_path / "out"))
    found: Any = inspect_output(tmp_path / "out")
    assert new["totals"]["parameters"] > old["totals"]["parameters"]
    assert new["totals"]["cf"] < old["totals"]["cf"]
    trained = new["healing"]["facts"]["train"]
    assert trained == ["additions of rank 2", "norms"], "no factor, and the model has no bias"
    assert sum(layer["parameters"] for layer in new["layers"]) == new["totals"]["parameters"]
    assert [x["rank"] for x in found["layers"]] == [x["rank"] for x in new["layers"]]
    stored = {name: t.nbytes for name, t in load_file(tmp_path / "out/model.safetensors").items()}
    for layer in found["layers"]:
        held = sum(size for name, size in stored.items() if name.startswith(f"{layer['module']}."))
        assert layer["bits"] == pytest.approx(8 * held / layer["dense_parameters"])
    assert [x["bits"] for x in new["layers"]] == pytest.approx([x["bits"] for x in found["layers"]])
    assert new["totals"]["bits"] == pytest.approx(found["bits"]) != old["totals"]["bits"]
    card = prepare_push(tmp_path / "out", "me/small").files["README.md"]
    assert isinstance(card, bytes) and b"blr compress" not in card.partition(b"## Made by")[2]


@pytest.mark.parametrize("method", ["svd", "blast"])
def test_the_sum_is_exact(method: str, dense: Path, tmp_path: Path) -> None:
    smaller = compress_pico(dense, tmp_path / "compressed", method)
    model = load_model(smaller, DECODER, dtype="float32", device="cpu")
    names = attach(model, 3, 0)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)}
    assert layers.keys() == names, "the tied head is no layer of its own"
    name, layer = next(iter(layers.items()))
    x = torch.randn(4, layer.in_features)
    with torch.no_grad():
        layer.added_B.normal_()
        plain = layer(x)
        add_products(model, names)
        trained = layer(x)
        masters = dict(model.named_parameters())
        product = product_of(masters, name)
        assert product is not None
        factors = {
            n: extended(layer.get_parameter(n), layer.spec, n, *product) for n in layer.spec.shapes()
        }
        spec = raised(layer.spec, 3)
        weight = STRUCTURES[spec.structure].factorizer().reconstruct(factors, spec)
    assert {n: tuple(f.shape) for n, f in factors.items()} == dict(spec.shapes())
    torch.testing.assert_close(x.double() @ weight.mT, trained.double(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, trained, atol=1e-2)


def test_nothing_grows_where_nothing_was_better(compressed: Path, dense: Path, tmp_path: Path) -> None:
    options = HealOptions(**{**vars(OPTIONS), "rate": 1.0, "steps": 4})
    summary = heal(compressed, dense, tmp_path / "out", options, QUIET)
    assert summary is not None and summary.best_step == 0
    shapes = [
        {n: t.shape for n, t in load_file(f / "model.safetensors").items()}
        for f in (compressed, tmp_path / "out")
    ]
    assert shapes[0] == shapes[1]


def test_layers_that_become_larger_than_dense_are_told() -> None:
    small, large = LowRankSpec(64, 64, rank=8), LowRankSpec(64, 64, rank=30)
    assert growth([small, large], 2) == []
    assert "make 1 of 2 layers larger than dense" in str(growth([small, large], 3))
