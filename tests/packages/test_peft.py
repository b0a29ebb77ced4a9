"""LoRA of peft on structured layers: trains, saves, loads and merges by the dense model's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bare
import peft
import pytest
import torch
from exporting import compress_to, export_to
from peft import LoraConfig, PeftModel, get_peft_model
from pico import VOCAB, save_pico
from running import Invoke
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.integrations.peft import StructuredLora, StructuredLoraModel
from blr.compressor.modeling.layers import StructuredLinear

register()

METHODS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "cf": 1.5},
    "monarch": {"method": "monarch", "cf": 1.5, "blocks": 4},
    "blast": {"method": "blast", "cf": 1.5, "blocks": 4, "rounds": 1},
    "ks": {"method": "ks", "cf": 1.5},
    "int3": {"method": "dense", "quantize": "int3", "group": 32},
    "corrected": {"method": "svd", "base": "int2", "rank": 4, "group": 32},
}
MERGES = {"svd", "blast"}
IDS = torch.arange(2, 26).view(2, 12) % VOCAB
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
# peft imported after blr and the model, as in a notebook.
LATER = """
import sys
from blr.compressor import register
register()
from transformers import AutoModelForCausalLM
assert "peft" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
import peft
found = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
assert type(found.base_model).__name__ == "StructuredLoraModel"
"""


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("compressed")
    source = save_pico("llama", folder / "dense")
    outputs = {m: compress_to(source, folder / m, **recipe) for m, recipe in METHODS.items()}
    return {**outputs, "export": export_to(outputs["blast"], folder / "export")}


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def wrapped(model: Any) -> dict[str, StructuredLora]:
    return {name: m for name, m in model.named_modules() if isinstance(m, StructuredLora)}


def trained(folder: Path, **options: Any) -> Any:
    """A peft model after two steps; without dropout."""
    torch.manual_seed(0)
    model = get_peft_model(
        load(folder), LoraConfig(**{"r": 2, "target_modules": "all-linear", **options})
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    before = model(IDS, labels=IDS).loss.item()
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(IDS, labels=IDS).loss.item() < before
    return model


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", ATTENTION | MLP),
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (r".*mlp\.(up|down)_proj", {"up_proj", "down_proj"}),
        (None, {"q_proj", "v_proj"}),  # peft's own choice for the native model type
    ],
    ids=["all-linear", "names", "pattern", "default"],
)
def test_names_are_those_of_the_dense_model(
    targets: Any, expected: set[str], compressed: dict[str, Path]
) -> None:
    model = get_peft_model(load(compressed["monarch"]), LoraConfig(target_modules=targets))
    assert {name.rpartition(".")[2] for name in wrapped(model)} == expected
    assert isinstance(model.base_model, StructuredLoraModel)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)


@pytest.mark.parametrize("method", [*METHODS, "export"])
def test_it_trains_saves_and_loads(method: str, compressed: dict[str, Path], tmp_path: Path) -> None:
    model = trained(compressed[method])
    expected = logits(model)
    assert not torch.allclose(expected, logits(load(compressed[method])))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(compressed[method]), tmp_path)
    assert len(wrapped(again)) == 14
    torch.testing.assert_close(logits(again), expected)
    with again.disable_adapter():
        torch.testing.assert_close(logits(again), logits(load(compressed[method])))


@pytest.mark.parametrize("method", sorted(MERGES))
def test_a_merge_is_exact_and_an_ordinary_output(
    method: str, compressed: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """Ranks grow; it is undone; saved without peft the folder loads, verifies and exports."""
    model = trained(compressed[method], target_modules=["q_proj", "down_proj"])
    expected, before = logits(model), load(compressed[method])
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected)
    merged = model.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged), expected)
    assert not wrapped(merged)
    for name, layer in merged.named_modules():
        if isinstance(layer, StructuredLinear):
            grown = 2 if name.endswith(("q_proj", "down_proj")) else 0
            assert layer.spec.rank == before.get_submodule(name).spec.rank + grown
    merged.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(load(tmp_path / "saved")), expected)
    assert invoke("verify", tmp_path / "saved")[0] == 0
    assert invoke("export", tmp_path / "saved", "-o", tmp_path / "export", "--quiet")[0] == 0
    torch.testing.assert_close(logits(load(tmp_path / "export")), expected)


@pytest.mark.parametrize("method", ["monarch", "ks", "int3", "corrected", "export"])
def test_what_cannot_be_merged_says_so_and_stays(method: str, compressed: dict[str, Path]) -> None:
    model = trained(compressed[method])
    expected = logits(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="cannot be merged into a layer of structure") as raised:
            merge()
        assert "\n" not in str(raised.value) and "keep the adapter" in str(raised.value)
    torch.testing.assert_close(logits(model), expected)


def test_factors_themselves_are_targets(compressed: dict[str, Path]) -> None:
    config = LoraConfig(r=2, target_modules=[], target_parameters=["q_proj.U", "q_proj.V"])
    model = get_peft_model(load(compressed["svd"]), config)
    found = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert found and all(".q_proj" in name for name in found)
    model(IDS, labels=IDS).loss.backward()


def test_dense_models_are_as_before(compressed: dict[str, Path]) -> None:
    dense = load(compressed["svd"].parent / "dense")
    model = get_peft_model(dense, LoraConfig(target_modules="all-linear"))
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    assert len(layers) == 14 and not wrapped(model)
    model.merge_and_unload()


def test_peft_may_be_imported_last(compressed: dict[str, Path]) -> None:
    done = bare.run(LATER, compressed["svd"])
    assert done.returncode == 0, done.stderr
