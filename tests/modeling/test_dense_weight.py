"""A structured layer has a `weight` for code that reads one: facts free, values true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.modeling.layers import StructuredLinear, make_layer
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)

pytestmark = pytest.mark.fast

SPECS: dict[str, Spec] = {
    "svd": LowRankSpec(12, 8, 3),
    "svd-in": LowRankSpec(12, 8, 3, 2, "in"),
    "monarch": MonarchSpec(12, 8, 4, 2),
    "blast": BlastSpec(12, 8, 4, 3),
    "ks": KroneckerSpec(12, 12, ((1, 6, 4, 2), (2, 2, 3, 2))),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def layer_of(spec: Spec) -> Any:
    torch.manual_seed(0)
    return make_layer(spec.to_dict(), True)


def reconstructed(layer: StructuredLinear) -> Tensor:
    return restored(layer.spec, layer.state_dict(), torch.float64)


@each_spec
def test_functions_of_torch_take_the_product_of_the_factors(spec: Spec) -> None:
    layer = layer_of(spec)
    weight, expected = layer.weight, reconstructed(layer)
    for found in (weight + 0.0, weight.T.mT, torch.stack([weight])[0], weight.detach()):
        assert not isinstance(found, DenseWeight)
        assert (found - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()
    x = torch.randn(5, spec.in_features)
    torch.testing.assert_close(linear(x, weight, layer.bias), layer(x))


@each_spec
def test_gradients_reach_the_factors(spec: Spec) -> None:
    layer = layer_of(spec)
    layer.weight.square().sum().backward()
    assert all(layer.get_parameter(name).grad.norm() > 0 for name in spec.shapes())


@each_spec
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_facts_cost_no_product(spec: Spec, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(spec).to(torch.bfloat16).to(place)
    monkeypatch.setattr(type(layer), "composed", None)  # calling it would fail
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert (weight.dtype, weight.device.type) == (torch.bfloat16, place)
    assert weight.shape == (spec.out_features, spec.in_features) == weight.size()
    assert weight.dim() == weight.ndim == 2 and weight.numel() == weight.shape.numel()
    assert torch.zeros(2).to(weight.dtype).dtype == weight.dtype


def test_packed_layers_have_one() -> None:
    spec = SPECS["svd"]
    layer = make_layer({**spec.to_dict(), "bits": 8}, False)
    assert layer.weight.shape == (8, 12) and (layer.weight + 1).sum() == 8 * 12


class Reads(nn.Module):
    """As the feed-forward layer of T5: reads the weight for its dtype."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.wo = layer_of(spec)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.wo.weight, Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


def test_a_traced_dtype_leaves_no_product_in_the_graph() -> None:
    model, x = Reads(SPECS["blast"]).eval(), torch.randn(4, 12, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    program = torch.export.export(model, (x,)).run_decompositions()
    assert "eye" not in str(program.graph)


def _assign(weight: Any) -> None:
    weight.data = torch.zeros(weight.shape)


def _subtract(weight: Any) -> None:
    weight.data -= 1.0


WRITES = {
    "data": _assign,
    "data -=": _subtract,
    "copy_": lambda weight: weight.copy_(torch.zeros(weight.shape)),
    "[0] =": lambda weight: weight.__setitem__(0, 1.0),
    "out": lambda weight: torch.neg(torch.zeros(weight.shape), out=weight),
    "init": lambda weight: nn.init.zeros_(weight),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_would_be_lost_cannot_be_written(write: Any) -> None:
    """A package that changes weights (peft's PiSSA, KaSA) would go on with another model."""
    layer = layer_of(SPECS["svd"])
    before = layer.weight + 0.0
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be written: change its factors"):
        write(layer.weight)
    assert torch.equal(layer.weight + 0.0, before)
    assert layer.weight.requires_grad_(True).shape == before.shape
