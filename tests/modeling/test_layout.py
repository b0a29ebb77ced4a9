"""Kernel layout is a matter of strides: values, shapes and saved files never change."""

from __future__ import annotations

import copy
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import orders
from hypothesis import given
from hypothesis import strategies as st
from kernel_layers import to_kernel_layout
from pico import save_pico
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.modeling import models
from blr.compressor.modeling.layers import (
    StructuredLinear,
    make_layer,
    prepare_layers,
)
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)
from blr.kernels.common.layout import canonical_view, in_order, relaid, to_physical
from blr.kernels.common.orders import order_of

register()

pytestmark = pytest.mark.fast

SPECS: dict[str, Spec] = {
    "svd": LowRankSpec(12, 10, 3),
    "svd-out": LowRankSpec(12, 10, 3, 2, "out"),
    "svd-in": LowRankSpec(12, 10, 3, 2, "in"),
    "monarch": MonarchSpec(12, 9, 3, 2),
    "blast": BlastSpec(12, 9, 3, 4),
    "ks": KroneckerSpec(12, 12, ((1, 6, 4, 2), (2, 2, 3, 2))),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def layer_of(spec: Spec) -> StructuredLinear:
    torch.manual_seed(0)
    return make_layer(spec.to_dict(), True)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
))  # fmt: skip
def test_views_undo_the_physical_order(case: tuple[list[int], list[int]]) -> None:
    """For every shape and every order of axes."""
    shape, order = case[0], tuple(case[1])
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    physical = to_physical(tensor, order)
    assert physical.is_contiguous()
    assert list(physical.shape) == [shape[axis] for axis in order]
    back = canonical_view(physical, order)
    assert back.data_ptr() == physical.data_ptr()
    assert torch.equal(back, tensor)
    assert in_order(back, order)
    assert relaid(back, order) is back
    assert torch.equal(relaid(tensor, order), tensor)


def test_layouts_are_orders_of_axes() -> None:
    for spec in SPECS.values():
        for order in orders(spec).values():
            assert order in permutations(range(len(order)))


@each_spec
def test_relayout_changes_strides_only(spec: Spec) -> None:
    layer = layer_of(spec)
    x = torch.randn(5, spec.in_features)
    before, expected = copy.deepcopy(layer.state_dict()), layer(x)
    pointers = {name: p.data_ptr() for name, p in layer.relayout_().named_parameters()}
    for name in spec.shapes():
        factor = layer.get_parameter(name)
        assert in_order(factor, order_of(name, factor.dim()))
        assert torch.equal(factor, before[name])
    torch.testing.assert_close(layer(x), expected)
    assert {name: p.data_ptr() for name, p in layer.relayout_().named_parameters()} == pointers


def test_input_factors_end_on_the_features() -> None:
    """What the layouts are for: the axis that products over x read has stride 1."""
    for name in ("svd", "monarch", "blast"):
        assert layer_of(SPECS[name]).relayout_().V.stride(-2) == 1
    assert all(f.stride(2) == 1 for f in layer_of(SPECS["ks"]).relayout_().ordered())


@each_spec
def test_saved_tensors_are_canonical_and_contiguous(spec: Spec, tmp_path: Path) -> None:
    layer = layer_of(spec)
    expected = copy.deepcopy(layer.state_dict())
    state = layer.relayout_().state_dict()
    save_file(state, tmp_path / "layer.safetensors")
    found = load_file(tmp_path / "layer.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert state[name].is_contiguous()
        assert torch.equal(tensor, expected[name])
    other = make_layer(spec.to_dict(), True).relayout_()
    other.load_state_dict(found)
    assert all(torch.equal(p, expected[n]) for n, p in other.named_parameters())


@each_spec
def test_state_dict_is_made_of_the_parameters_where_it_can(spec: Spec) -> None:
    """Entries alias what the layer holds, as everywhere in torch: only those in another order are
    copies."""
    layer = layer_of(spec)
    held = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    pointers = {name: t.data_ptr() for name, t in held.items()}
    assert {name: t.data_ptr() for name, t in layer.state_dict().items()} == pointers
    kept = layer.relayout_().state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in layer.named_parameters())


@each_spec
def test_training_moves_relaid_factors(spec: Spec) -> None:
    layer, other = layer_of(spec), layer_of(spec).relayout_()
    x = torch.randn(5, spec.in_features)
    for trained in (layer, other):
        optimizer = torch.optim.Adam(trained.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), p)


@each_spec
def test_a_cast_keeps_the_layout(spec: Spec) -> None:
    layer = layer_of(spec).relayout_().to(torch.bfloat16)
    for name in spec.shapes():
        factor = layer.get_parameter(name)
        assert in_order(factor, order_of(name, factor.dim()))


def test_only_layers_on_a_gpu_are_relaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those nested in a model that is moved or cast; the meta device stands for a GPU here."""
    model = torch.nn.Sequential(layer_of(SPECS["blast"]), torch.nn.Sequential(layer_of(SPECS["ks"])))
    seen: list[StructuredLinear] = []
    monkeypatch.setattr(StructuredLinear, "relayout_", lambda self: seen.append(self))
    model.to(torch.float64)
    prepare_layers(model)
    assert seen == []
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", property(lambda p: p.is_meta), raising=False)
    model.to("meta")
    assert set(seen) == {model[0], model[1][0]}


# Models.


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("outputs")
    source = save_pico("llama", folder / "dense")
    for method in ("svd", "monarch", "blast", "ks"):
        recipe = make_recipe(method=method, cf=1.5, rounds=1, blocks=None if method == "ks" else 4)
        compress(source, recipe, folder / method, Settings("pico", check=False), Progress(quiet=True))
    return {method: folder / method for method in ("svd", "monarch", "blast", "ks")}


def relay(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, StructuredLinear):
            module.relayout_()
    return model


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
def test_a_relaid_model_saves_what_it_was_loaded_from(
    method: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    model = relay(AutoModelForCausalLM.from_pretrained(outputs[method]))
    expected = load_file(outputs[method] / "model.safetensors")
    model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("info", [False, True])
def test_loading_ends_with_the_layout(
    info: bool, outputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights loaded straight onto a GPU are never moved, so loading itself must see to it."""
    prepared: list[Any] = []
    monkeypatch.setattr(models, "prepare_layers", prepared.append)
    loaded = AutoModelForCausalLM.from_pretrained(outputs["svd"], output_loading_info=info)
    assert prepared == [loaded[0] if info else loaded]
    assert not any(p.is_meta for p in prepared[0].parameters())


RANKS = (1, 2, 7, 8, 13, 31, 64, 101, 251, 499, 997, 1499, 1501)


@pytest.mark.parametrize("exported", [False, True], ids=["canonical", "kernel"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("blocks", [0, 3], ids=["svd", "blast"])
def test_ranks_have_zeros_behind_them(blocks: int, rank: int, exported: bool) -> None:
    """Kernels see multiples of 16; values, shapes, saved tensors and gradients are as without."""
    spec = BlastSpec(12, 9, blocks, rank) if blocks else LowRankSpec(12, 10, rank)
    layer, x = layer_of(spec), torch.randn(5, spec.in_features)
    if exported:
        to_kernel_layout(layer)
    before, expected = copy.deepcopy(layer.state_dict()), layer(x)
    prepared = layer.relayout_().widen_()
    where = [factor.data_ptr() for factor in prepared.ordered()]
    assert [f.data_ptr() for f in prepared.relayout_().widen_().ordered()] == where
    with torch.no_grad():
        for factor, whole in zip(layer.ordered(), layer.factors_for(x), strict=True):
            assert whole.shape[-1] == -(-rank // 16) * 16 and torch.equal(whole[..., :rank], factor)
            assert not whole[..., rank:].any()
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x), expected)
    for name, tensor in layer.state_dict().items():
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        assert torch.equal(tensor, before[name])
    layer.load_state_dict({name: 2 * tensor for name, tensor in before.items()})
    torch.testing.assert_close(layer.state_dict(), {name: 2 * t for name, t in before.items()})
    with torch.no_grad():
        assert all(not f[..., rank:].any() for f in layer.factors_for(x))


def test_factors_that_were_put_elsewhere_have_no_zeros_behind_them() -> None:
    layer = layer_of(LowRankSpec(12, 10, 3)).widen_()
    x = torch.randn(5, 12)
    layer.V.data = torch.full((4, 12), float("nan")).mul_(1)[:3].T
    layer.V.data.zero_()
    with torch.no_grad():
        assert [f.shape[-1] for f in layer.factors_for(x)] == [3, 3]
        assert torch.equal(layer(x), layer.bias.expand(5, -1))
    assert copy.deepcopy(layer_of(LowRankSpec(12, 10, 3)).widen_()).factors_for(x)[0].shape == (10, 3)


def test_nor_have_others_at_the_same_address() -> None:
    """Where weights come and go, as when accelerate offloads, an allocator gives what it got back."""
    layer, x = layer_of(LowRankSpec(12, 10, 3)).widen_(), torch.randn(5, 12)
    with torch.no_grad():
        assert [f.shape[-1] for f in layer.factors_for(x)] == [16, 16]
        layer.U.data = layer.U.data.as_strided((10, 3), (3, 1))
        assert [f.shape[-1] for f in layer.factors_for(x)] == [3, 3]
