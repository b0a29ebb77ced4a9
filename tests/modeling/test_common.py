"""What transformers' own common tests ask of a model class; scripts/check_transformers.sh runs them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporting import compress_to
from pico import save_pico
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import register

INT2 = {"method": "svd", "base": "int2", "rank": 2, "group": 32}
WAYS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd"},
    "ks": {"method": "ks"},
    "int2": INT2,
    "fp8": {"method": "blast", "blocks": 4, "rounds": 1, "quantize": "fp8"},
    "int8": {"method": "dense", "quantize": "int8", "group": 32},
}


@pytest.fixture(scope="module", params=WAYS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed pico Llama with a tied head."""
    work = tmp_path_factory.mktemp(request.param)
    dense = save_pico("llama-tied", work / "dense")
    return compress_to(dense, work / "out", **WAYS[request.param])


def made(folder: Path, name: str = "BlrLlamaForCausalLM", device: str = "cpu") -> Any:
    """A model of the folder's configuration, not loaded."""
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))
    with torch.device(device):
        return model_class(name)(config)


def test_what_was_made_on_the_meta_device_gets_the_same_first_values(folder: Path) -> None:
    """What is packed exactly, what is drawn of the same size; nothing is what lay in memory."""
    here, moved = made(folder), made(folder, device="meta").to_empty(device="cpu")
    for tensor in (*moved.parameters(), *moved.buffers()):
        tensor.data.view(torch.uint8).fill_(255)  # NaN of floats
    moved.init_weights()
    packed = dict(here.named_buffers())
    for name, buffer in moved.named_buffers():
        assert torch.equal(buffer.view(torch.uint8), packed[name].view(torch.uint8)), name
    drawn = dict(here.named_parameters())
    for name, tensor in moved.named_parameters():
        assert torch.isfinite(tensor).all(), name
        if tensor.numel() >= 128:
            wanted = float(drawn[name].detach().std())
            assert float(tensor.detach().std()) == pytest.approx(wanted, rel=0.5, abs=1e-6), name


def test_first_values_compute_something(folder: Path) -> None:
    """Outputs depend on the inputs, and are neither tiny nor huge."""
    model, ids = made(folder).eval(), torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        for layer in model.model.layers:
            x = torch.randn(4, layer.mlp.up_proj.in_features)
            y = layer.mlp.up_proj(x)
            assert 0.1 < y.std() < 3 and not torch.allclose(y[0], y[1])
        logits = model(ids).logits
    assert torch.isfinite(logits).all() and not torch.allclose(logits[0], logits[1])


def test_loaded_values_stay(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    held = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    loaded.init_weights()
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())


def test_a_tied_head_is_split_with_its_embedding_or_not_at_all(folder: Path) -> None:
    model = made(folder)
    assert model.tp_plan == {}, "nobody else can split the layers by the native plan"
    type(model).maybe_distribute_model(model, SimpleNamespace(tp_size=2), None)
    names = {module: name for name, module in model.named_modules()}
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    plan = {names[model.get_output_embeddings()], names[model.get_input_embeddings()]}
    assert plan <= model.tp_plan.keys()


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2", "t5"])
def test_a_configuration_promises_no_plan_that_is_empty(family: str) -> None:
    assert register(family).base_model_tp_plan is None


def test_sizes_may_be_ignored_where_that_is_asked_for(tmp_path: Path) -> None:
    """A head for other labels begins anew; all else is loaded."""
    model = compress_to(save_pico("llama", tmp_path / "dense"), tmp_path / "out", method="svd")
    first = AutoModelForSequenceClassification.from_pretrained(model, num_labels=3)
    first.save_pretrained(tmp_path / "three")
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "three", num_labels=5)
    found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "three", num_labels=5, ignore_mismatched_sizes=True
    )
    assert found.score.weight.shape == (5, found.config.hidden_size)
    theirs = dict(first.named_parameters())
    kept = [n for n, p in found.named_parameters() if n != "score.weight" and torch.equal(p, theirs[n])]
    assert len(kept) == len(theirs) - 1
