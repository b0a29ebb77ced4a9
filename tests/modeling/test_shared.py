"""Layers of one input computed together give what each gives alone, whatever happens between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_layers import to_kernel_layout
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from blr.compressor.modeling import shared_input as shared
from blr.compressor.modeling.layers import StructuredLinear, make_layer
from blr.compressor.modeling.modeling_blr import config_class
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.shared_input import SharedInput, pack_shared_input, share_siblings
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, Spec
from blr.kernels.common.layout import ALIGNED
from blr.kernels.layers.lowrank.op import packed

pytestmark = pytest.mark.fast

OUTPUTS_AND_RANKS = ((10, 3), (4, 1), (4, 2))


def layer_of(spec: Spec) -> StructuredLinear:
    torch.manual_seed(0)
    return make_layer(spec.to_dict(), True).eval()


def group() -> list[StructuredLinear]:
    return [layer_of(LowRankSpec(12, o, r)) for o, r in OUTPUTS_AND_RANKS]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that were taken through all layers at once."""
    seen: list[Tensor] = []
    native = SharedInput._outputs

    def counted(self: SharedInput, x: Tensor) -> dict[int, Tensor]:
        seen.append(x)
        return native(self, x)

    monkeypatch.setattr(SharedInput, "_outputs", counted)
    return seen


def outputs(layers: list[StructuredLinear], x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [layer(x) for layer in layers]


def test_packed_layers_share_one_tensor_and_compute_the_same(tmp_path: Path) -> None:
    layers, x = group(), torch.randn(5, 12)
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    expected = [layer(x) for layer in layers]
    stored = pack_shared_input(layers)
    assert stored.shape == (6, 12)
    Vs = [layer.V for layer in layers]
    found = packed(Vs)
    assert found is not None
    assert (found.data_ptr(), found.shape) == (stored.data_ptr(), stored.shape)
    torch.testing.assert_close([layer(x) for layer in layers], expected)
    state = {f"{n}.{k}": t for n, layer in enumerate(layers) for k, t in layer.state_dict().items()}
    save_file(state, tmp_path / "packed.safetensors")
    saved = load_file(tmp_path / "packed.safetensors")
    assert all(torch.equal(saved[f"{n}.{k}"], t) for n, d in enumerate(before) for k, t in d.items())


def test_a_packed_layer_stays_packed_when_it_is_relaid() -> None:
    layers = group()
    pack_shared_input(layers)
    for layer in layers:
        layer.relayout_()
    assert packed([layer.V for layer in layers]) is not None


@pytest.mark.parametrize("prepare", [lambda layer: None, to_kernel_layout], ids=["canonical", "kernel"])
def test_one_product_serves_all_layers_of_an_input(
    prepare: Callable[[StructuredLinear], None], calls: list[Tensor]
) -> None:
    layers = group()
    for layer in layers:
        prepare(layer)
    first, second = torch.randn(2, 5, 12), torch.randn(3, 12)
    expected = [outputs(layers, x) for x in (first, second)]
    SharedInput(layers)
    assert packed([layer.V for layer in layers]) is not None
    for x, wanted in zip((first, second), expected, strict=True):
        torch.testing.assert_close(outputs(layers, x), wanted)
    assert [x.shape for x in calls] == [first.shape, second.shape]


def test_inputs_that_changed_in_place_are_computed_again(calls: list[Tensor]) -> None:
    layers, x = group(), torch.randn(5, 12)
    SharedInput(layers)
    with torch.no_grad():
        layers[0](x)
        x.mul_(2)
        found = layers[1](x)
    torch.testing.assert_close(found, (x @ layers[1].V) @ layers[1].U.mT + layers[1].bias)
    assert len(calls) == 2


def test_a_layer_called_twice_or_alone_is_right(calls: list[Tensor]) -> None:
    layers, x, other = group(), torch.randn(5, 12), torch.randn(5, 12)
    expected, at_other = outputs(layers[:1], x)[0], outputs(layers[:1], other)[0]
    SharedInput(layers)
    with torch.no_grad():
        torch.testing.assert_close([layers[0](x), layers[0](x), layers[0](other)],
                                   [expected, expected, at_other])  # fmt: skip
    assert len(calls) == 3


def test_training_many_tokens_and_inference_mode_compute_alone(
    calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_TOKENS", 8)
    layers, x, long = group(), torch.randn(5, 12), torch.randn(3, 3, 12)
    expected, at_long = outputs(layers, x), outputs(layers, long)
    SharedInput(layers)
    loss = sum(layer(x).sum() for layer in layers)
    loss.backward()
    assert all(layer.V.grad is not None for layer in layers)
    torch.testing.assert_close(outputs(layers, long), at_long)
    with torch.inference_mode():
        inside = torch.randn(5, 12).copy_(x)
        torch.testing.assert_close([layer(inside) for layer in layers], expected)
    assert calls == []


def test_moved_and_copied_layers_stay_right(calls: list[Tensor]) -> None:
    layers, x = group(), torch.randn(5, 12)
    expected = outputs(layers, x)
    SharedInput(layers)
    moved = torch.nn.ModuleList(layers).double()
    torch.testing.assert_close([y.float() for y in outputs(list(moved), x.double())], expected)
    SharedInput(list(moved))
    copied = copy.deepcopy(moved).float()
    assert isinstance(copied[0], StructuredLinear)
    assert copied[0].shared is None
    torch.testing.assert_close(outputs(list(copied), x), expected)
    assert calls == []


def test_a_layer_with_other_factors_parts_the_group(calls: list[Tensor]) -> None:
    """As an adapter that is merged replaces them, or a run that keeps weights on the CPU."""
    layers, x = group(), torch.randn(5, 12)
    SharedInput(layers)
    layers[1].V = torch.nn.Parameter(2 * layers[1].V.detach())
    torch.testing.assert_close(outputs(layers, x), [(x @ p.V) @ p.U.mT + p.bias for p in layers])
    assert calls == [] and all(layer.shared is None for layer in layers)


def test_two_groups_of_one_input_are_right(calls: list[Tensor]) -> None:
    """As where attention and MLP read the same norm."""
    first, second, x = group(), group(), torch.randn(5, 12)
    expected = outputs([*first, *second], x)
    SharedInput(first), SharedInput(second)
    order = [first[0], second[0], first[1], second[1], first[2], second[2]]
    found = dict(zip(map(id, order), outputs(order, x), strict=True))
    torch.testing.assert_close([found[id(layer)] for layer in (*first, *second)], expected)


def test_replicas_of_a_layer_compute_alone(calls: list[Tensor]) -> None:
    """Copies that hold the same attributes, as of torch.nn.DataParallel."""
    layers, x = group(), torch.randn(5, 12)
    SharedInput(layers)
    replicas = [copy.copy(layer) for layer in layers]
    torch.testing.assert_close(outputs(replicas, x), outputs(layers, x))
    assert len(calls) == 1  # by the layers themselves


LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def structured_llama(**kinds: Spec) -> Any:
    """A model with low-rank layers of rank 16, of `kinds` those it names."""
    native = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=64))
    layers = {}
    for name, module in native.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            spec = LowRankSpec(module.in_features, module.out_features, ALIGNED)
            layers[name] = kinds.get(name.rpartition(".")[2], spec).to_dict()
    torch.manual_seed(0)
    table = {"format": 1, "layers": layers}
    config = config_class("BlrLlamaConfig")(**native.config.to_dict(), blr=table)
    return model_class("BlrLlamaForCausalLM")(config).eval()


def test_models_on_a_gpu_share_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole models that are moved: the same logits, in the same bytes when saved."""
    model, ids = structured_llama(), torch.arange(7)[None]
    with torch.no_grad():
        expected = model(ids).logits
    assert share_siblings(model) == 0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(shared, "_on_gpu", lambda tensor: True)
    model.to("cpu")
    own = model.model.layers[0]
    groups = {layer.shared for layer in (own.self_attn.q_proj, own.self_attn.v_proj, own.mlp.up_proj)}
    assert len(groups) == 2 and None not in groups
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(t.untyped_storage().nbytes() == t.nbytes for n, t in after.items() if n.endswith(".V"))


@pytest.mark.parametrize(
    "kind",
    [LowRankSpec(32, 32, 7), LowRankSpec(32, 32, 4, 2, "out"), BlastSpec(32, 32, 4, 8)],
    ids=["odd rank", "groups", "structure"],
)
def test_other_layers_keep_a_group_apart(kind: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd rank has zeros behind it on a GPU, which views of one tensor have no room for."""
    model = structured_llama(q_proj=kind)
    monkeypatch.setattr(shared, "_on_gpu", lambda tensor: True)
    for layer in model.modules():
        if isinstance(layer, StructuredLinear):
            layer.relayout_().widen_()
    assert share_siblings(model) == 1  # gate and up
    assert model.model.layers[0].self_attn.k_proj.shared is None
