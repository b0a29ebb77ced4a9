"""The structures' operators: values, gradients, tracing and several copies in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.modeling.layers import StructuredLinear, make_layer
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)
from blr.kernels.common import registration

SPECS: list[Spec] = [
    LowRankSpec(12, 10, 3),
    MonarchSpec(12, 9, 3, 2),
    BlastSpec(12, 9, 3, 4),
    KroneckerSpec(12, 12, ((1, 6, 4, 2), (2, 2, 3, 2))),
]
IDS = [spec.structure for spec in SPECS]
each_structure = pytest.mark.parametrize("spec", SPECS, ids=IDS)


def layer_of(spec: Spec, dtype: torch.dtype = torch.float64, bias: bool = True) -> StructuredLinear:
    torch.manual_seed(0)
    layer = make_layer(spec.to_dict(), bias).to(dtype)
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer


def input_of(spec: Spec, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*batch, spec.in_features, dtype=dtype)


@each_structure
def test_every_way_of_calling_gives_the_same(spec: Spec) -> None:
    """With gradients through the dispatcher, without them straight, in inference mode."""
    layer, x = layer_of(spec), input_of(spec, 2, 5)
    expected = layer(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    assert layer(x[:0]).shape == (0, 5, spec.out_features)
    assert layer(x[0, 0]).shape == (spec.out_features,)


@each_structure
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_agree_with_finite_differences(spec: Spec, bias: bool) -> None:
    layer, x = layer_of(spec, bias=bias), input_of(spec, 4).requires_grad_()

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(run, (x, *layer.parameters()))


@each_structure
def test_only_what_needs_a_gradient_gets_one(spec: Spec) -> None:
    """Each gradient alone equals that of a full backward, whatever intermediates it needs."""
    layer, x = layer_of(spec), input_of(spec, 4)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    full = gradients(layer, x, names)
    for name in names:
        alone = gradients(layer, x, [name])
        assert alone.keys() == {name}
        torch.testing.assert_close(alone[name], full[name])


def gradients(layer: StructuredLinear, x: Tensor, wanted: list[str]) -> dict[str, Tensor]:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_("x" in wanted)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in wanted)
    layer(x).square().sum().backward()
    held = {"x": x, **dict(layer.named_parameters())}
    return {name: tensor.grad for name, tensor in held.items() if tensor.grad is not None}


@each_structure
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_lower_precision(spec: Spec, dtype: torch.dtype) -> None:
    layer, x = layer_of(spec, dtype), input_of(spec, 64, dtype=dtype)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    found = gradients(layer, x, names)
    expected = gradients(copy.deepcopy(layer).double(), x.double(), names)
    for name in names:
        assert found[name].dtype == dtype
        error = (found[name].double() - expected[name]).norm() / expected[name].norm()
        assert float(error) < TOLERANCES[dtype], name


@each_structure
def test_operator_follows_the_rules_of_torch(spec: Spec) -> None:
    """Schema, fake kernel, autograd registration and AOT dispatch with dynamic shapes."""
    layer, x = layer_of(spec, torch.float32), input_of(spec, 3, dtype=torch.float32)
    for call in recorded(lambda: layer(x.requires_grad_())):
        torch.library.opcheck(*call)


def recorded(run: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Operators that `run` calls, with their arguments."""
    calls: list[tuple[Any, ...]] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == registration.NAMESPACE:
                leaves = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach(), args)
                calls.append((func, leaves))
            return func(*args, **(kwargs or {}))

    with Record():
        run()
    assert calls
    return calls


@pytest.mark.sampled(3)
@each_structure
@pytest.mark.parametrize("train", [True, False], ids=["train", "inference"])
def test_compiles_to_one_graph_for_every_batch(spec: Spec, train: bool) -> None:
    torch._dynamo.reset()
    layer = layer_of(spec, torch.float32).requires_grad_(train)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = "aot_eager" if train else keep
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 7, 20):
        x = input_of(spec, n, dtype=torch.float32).requires_grad_(train)
        found, expected = compiled(x), layer(x)
        torch.testing.assert_close(found, expected)
        if train:
            taken = torch.autograd.grad(found.sum(), layer.parameters())
            given = torch.autograd.grad(expected.sum(), layer.parameters())
            torch.testing.assert_close(taken, given)
    if not train:
        assert len(graphs) == 1
        names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
        assert sum(name.startswith("blr.") for name in names) == 1


@each_structure
def test_autocast_computes_in_its_dtype(spec: Spec) -> None:
    layer, x = layer_of(spec, torch.float32), input_of(spec, 4, dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert found.dtype == compiled.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < TOLERANCES[torch.bfloat16] * expected.norm()


@each_structure
def test_other_dtypes_than_the_factors_are_refused(spec: Spec) -> None:
    layer = layer_of(spec, torch.float32)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(TypeError, match="cast one of them"):
            layer(input_of(spec, 2, dtype=torch.bfloat16))


def test_a_second_copy_of_the_code_registers_beside_the_first() -> None:
    """As the copies inside checkpoints do: another version must run its own code."""
    arguments = ("(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like, lambda *a, **k: None)
    later = (lambda ctx, g: g, torch.clone)
    first = registration.register("twice", *arguments, *later)
    second = registration.register("twice", arguments[0], lambda x: x + 2, *arguments[2:], *later)
    x = torch.zeros(2)
    assert first.op(x).tolist() == [1, 1]
    assert second.op(x).tolist() == [2, 2]
