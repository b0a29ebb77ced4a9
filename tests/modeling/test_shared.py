"""Layers of one input computed together give what each gives alone, whatever happens between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr.compressor.export.pack import quantize_layer
from blr.compressor.modeling import shared_input as shared
from blr.compressor.modeling.kernel_layout import to_kernel_layout
from blr.compressor.modeling.layers import LowRankLinear, StructuredLinear, structured_linear
from blr.compressor.modeling.shared_input import SharedInput, pack_shared_input
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, Spec
from blr.kernels.lowrank.op import lowrank_group, packed

pytestmark = pytest.mark.fast

OUTPUTS_AND_RANKS = ((10, 3), (4, 1), (4, 2))


def layer_of(spec: Spec) -> StructuredLinear:
    torch.manual_seed(0)
    return structured_linear(spec.to_dict(), True).eval()


def group() -> list[StructuredLinear]:
    return [layer_of(LowRankSpec(12, o, r)) for o, r in OUTPUTS_AND_RANKS]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs that were taken through all layers at once."""
    seen: list[Tensor] = []

    def counted(x: Tensor, *factors: list[Tensor]) -> list[Tensor]:
        seen.append(x)
        return lowrank_group(x, *factors)

    monkeypatch.setattr(shared, "lowrank_group", counted)
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
    together = lowrank_group(x, [layer.U for layer in layers], Vs, [layer.bias for layer in layers])
    torch.testing.assert_close(together, expected)
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


@pytest.mark.parametrize(
    "others",
    [[LowRankSpec(6, 4, 2)], [LowRankSpec(12, 4, 2, 2, "out")], [BlastSpec(12, 9, 3, 4)]],
    ids=["input", "grouped", "structure"],
)
def test_layers_that_cannot_share_are_refused(others: list[Spec]) -> None:
    layers = [*group(), *map(layer_of, others)]
    with pytest.raises(ValueError, match=r"share a stored V|expected one"):
        pack_shared_input(layers)
    assert packed([layer.V for layer in layers[:3]]) is None


def test_a_quantized_layer_is_refused() -> None:
    layers = [*group(), quantize_layer(layer_of(LowRankSpec(12, 4, 2)), 8)[0]]
    with pytest.raises(ValueError, match="share a stored V"):
        pack_shared_input(layers)


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


def test_moved_and_copied_layers_stay_right() -> None:
    layers, x = group(), torch.randn(5, 12)
    expected = outputs(layers, x)
    SharedInput(layers)
    moved = torch.nn.ModuleList(layers).double()
    torch.testing.assert_close([y.float() for y in outputs(list(moved), x.double())], expected)
    copied = copy.deepcopy(moved).float()
    assert isinstance(copied[0], LowRankLinear)
    assert copied[0].shared is not layers[0].shared
    torch.testing.assert_close(outputs(list(copied), x), expected)
