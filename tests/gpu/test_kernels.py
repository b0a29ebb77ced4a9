"""Every kernel variant computes on a GPU what the float64 reference does.

Every structure × variant × precision × shape × number of tokens, outputs poisoned with NaN, factors
in canonical and in kernel layout, inputs contiguous or not; then layers under torch.compile, in CUDA
graphs, with gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rows import Row, attempt, bounded, relative, row
from tolerances import TOLERANCES
from torch import Tensor

from blr.bench.checks import PRECISIONS, computing_in
from blr.bench.products import reference_of, variants_of
from blr.compressor.modeling.layers import StructuredLinear, make_layer
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
)
from blr.kernels.common.available import kernel_device
from blr.kernels.common.layout import in_order, with_zeros
from blr.kernels.common.orders import order_of
from blr.kernels.common.tables import MOST

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterator[Row]], None]

TOKENS = (1, 2, 3, 5, 8, 17, 33, 64, 129, 1000)
FEW = (1, 3, 8, 17)  # for the interpreter, which is slow
SPECS: dict[str, list[Spec]] = {
    "svd": [
        LowRankSpec(100, 36, 7),
        LowRankSpec(130, 258, 1),
        LowRankSpec(96, 160, 24),
        LowRankSpec(1024, 768, 256),
        *(LowRankSpec(264, 192, rank) for rank in (2, 13, 101, 251, 1501)),
    ],
    "monarch": [
        MonarchSpec(60, 36, 3, 5),
        MonarchSpec(192, 288, 6, 11),
        MonarchSpec(144, 216, 9, 2),
        MonarchSpec(1024, 768, 16, 4),
        MonarchSpec(256, 192, 4, 31),
    ],
    "blast": [
        BlastSpec(60, 36, 3, 10),
        BlastSpec(192, 288, 6, 33),
        BlastSpec(144, 216, 9, 40),
        BlastSpec(1024, 768, 16, 64),
        *(BlastSpec(256, 192, 4, rank) for rank in (1, 37, 499)),
    ],
    "ks": [
        KroneckerSpec(12, 12, ((1, 6, 4, 2), (2, 2, 3, 2))),
        KroneckerSpec(1080, 648, ((3, 24, 40, 9),)),
        KroneckerSpec(40, 24, ((2, 3, 5, 4),)),
        KroneckerSpec(384, 384, ((1, 192, 48, 2), (2, 48, 192, 1))),
    ],
}
GROUPED = (LowRankSpec(96, 160, 6, 4, "out"), LowRankSpec(96, 160, 6, 4, "in"))


def limit_of(precision: str) -> float:
    """TF32 has the significand of float16."""
    return TOLERANCES[torch.float16 if precision == "tf32" else PRECISIONS[precision].dtype]


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates uninitialized for kernels is full of NaN."""
    kept = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            made = make(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty = map(filled, kept)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty = kept


def layer_of(spec: Spec, dtype: torch.dtype, device: str, bias: bool) -> StructuredLinear:
    torch.manual_seed(0)
    layer = make_layer(spec.to_dict(), bias)
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer.to(device, dtype).requires_grad_(False)


def input_of(spec: Spec, n: int, dtype: torch.dtype, device: str, kind: str = "whole") -> Tensor:
    """[n, i]: contiguous, every other column of a wider tensor, or stored transposed."""
    random = torch.Generator().manual_seed(n)
    wide = torch.randn(n, 2 * spec.in_features, generator=random).to(device, dtype)
    if kind == "strided":
        return wide[:, ::2]
    x = wide[:, : spec.in_features].contiguous()
    return x.T.contiguous().T if kind == "transposed" else x


def exact(spec: Spec, layer: StructuredLinear, x: Tensor) -> Tensor:
    """The layer in float64."""
    factors = [layer.get_parameter(name).double() for name in spec.shapes()]
    y = reference_of(spec.structure)(x.double(), *factors)
    return y if layer.bias is None else y + layer.bias.double()


SHAPES = [(name, index) for name, specs in SPECS.items() for index in range(len(specs))]
EVERY = [*SHAPES, *(("svd", len(SPECS["svd"]) + index) for index in range(len(GROUPED)))]


def spec_of(structure: str, index: int) -> Spec:
    """`SPECS`, and `GROUPED` after those of "svd"."""
    return (*SPECS[structure], *(GROUPED if structure == "svd" else ()))[index]


@pytest.fixture(autouse=True)
def kernels_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of fallbacks would prove nothing."""
    monkeypatch.setenv("BLR_KERNELS", "triton")
    assert kernel_device(torch.empty(0, device=device))


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32", "tf32"])
@pytest.mark.parametrize(("structure", "index"), SHAPES)
def test_variants(structure: str, index: int, precision: str, device: str, judge: Judge) -> None:
    """Every variant of a structure at one shape, and what a layer chooses itself."""
    if device == "cpu" and precision == "bfloat16":
        pytest.skip("bfloat16 dots are wrong in Triton's interpreter")
    with computing_in(PRECISIONS[precision]):
        judge(compare_variants(structure, index, precision, device))


def compare_variants(structure: str, index: int, precision: str, device: str) -> Iterator[Row]:
    """Layouts and inputs alternate with the number of tokens."""
    spec, dtype = SPECS[structure][index], PRECISIONS[precision].dtype
    layer = layer_of(spec, dtype, device, bias=index % 2 == 0).relayout_()
    table = variants_of(structure)
    for position, n in enumerate(TOKENS if device != "cpu" else FEW):
        kind = {3: "strided", 129: "transposed"}.get(n, "whole")
        x = input_of(spec, n, dtype, device, kind)
        relaid = [layer.get_parameter(name).detach() for name in spec.shapes()]
        kernel_layout = position % 2 == 0
        factors = relaid if kernel_layout else [factor.contiguous() for factor in relaid]
        expected = exact(spec, layer, x)
        where = f"{'kernel' if kernel_layout else 'canonical'} layout, {kind} x"
        bias = "bias" if layer.bias is not None else "no bias"
        case = f"{spec.in_features}→{spec.out_features} {spec.describe()} n={n}, {where}, {bias}"
        runs = {name: partial(run, x, *factors, bias=layer.bias) for name, run in table.items()}
        runs["entry point"] = partial(layer, x)
        for name, run in runs.items():
            if n > MOST.get(name, n):
                continue
            pair = lambda run=run, expected=expected: (run(), expected)  # noqa: E731
            with poisoned():
                found = attempt(f"{structure} {precision}", f"{name} {case}", limit_of(precision), pair)
            yield found


@pytest.mark.parametrize(("structure", "index"), [e for e in EVERY if e[1] == 1 or e not in SHAPES])
def test_compiled(structure: str, index: int, on_cuda: str, judge: Judge) -> None:
    """torch.compile in one graph, for two numbers of tokens, against the eager layer."""
    spec = spec_of(structure, index)
    layer = layer_of(spec, torch.bfloat16, on_cuda, bias=True)
    compiled = torch.compile(layer, fullgraph=True)

    def rows() -> Iterator[Row]:
        for n in (17, 3):
            x = input_of(spec, n, torch.bfloat16, on_cuda)
            run = lambda x=x: (compiled(x), layer(x).double())  # noqa: E731
            case = f"{spec.describe()} n={n}"
            yield attempt(f"{structure} torch.compile", case, limit_of("bfloat16"), run)

    judge(rows())


@pytest.mark.parametrize(("structure", "index"), [shape for shape in SHAPES if shape[1] in (1, 3)])
def test_graph(structure: str, index: int, on_cuda: str, judge: Judge) -> None:
    """A captured layer, replayed on other inputs, against the eager layer."""
    spec = SPECS[structure][index]
    layer = layer_of(spec, torch.bfloat16, on_cuda, bias=True)

    def run(n: int) -> tuple[Tensor, Tensor]:
        static, other = (input_of(spec, n, torch.bfloat16, on_cuda) * f for f in (1, -3))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            layer(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = layer(static)
        static.copy_(other)
        y.fill_(float("nan"))
        graph.replay()
        return y, exact(spec, layer, other)

    group, limit = f"{structure} CUDA graph", limit_of("bfloat16")
    judge(attempt(group, f"{spec.describe()} n={n}", limit, partial(run, n)) for n in (1, 17, 129))


@pytest.mark.parametrize(("structure", "index"), [shape for shape in SHAPES if shape[1] in (1, 3)])
def test_calls_of_one_shape(structure: str, index: int, device: str, judge: Judge) -> None:
    """From the second on what can be replayed is: other inputs at other addresses, other weights."""
    spec = SPECS[structure][index]

    def rows() -> Iterator[Row]:
        for n in (1, 17, 129, 1000):
            layers = [layer_of(spec, torch.bfloat16, device, bias=True) for _ in range(2)]
            for turn, layer in enumerate(layers * 2):
                x = (turn - 1.5) * input_of(spec, n, torch.bfloat16, device)
                pair = lambda layer=layer, x=x: (layer(x), exact(spec, layer, x))  # noqa: E731
                with torch.no_grad():
                    yield attempt(f"{structure} again", f"n={n} {turn}", limit_of("bfloat16"), pair)

    judge(rows())


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32", "tf32"])
@pytest.mark.parametrize("structure", SPECS)
def test_gradients(structure: str, precision: str, device: str, judge: Judge) -> None:
    """Gradients of everything against the same in float64 on the CPU."""
    spec, dtype = SPECS[structure][1], PRECISIONS[precision].dtype
    layer = layer_of(spec, dtype, device, bias=True)
    x = input_of(spec, 33, dtype, device)
    with computing_in(PRECISIONS[precision]):
        expected = gradients(copy.deepcopy(layer).cpu().double(), x.cpu().double())
        found = gradients(layer, x)
    group, limit = f"{structure} gradients {precision}", limit_of(precision)
    pairs = {name: (gradient, expected[name].to(device)) for name, gradient in found.items()}
    judge(
        attempt(group, f"{spec.describe()} d{name}", limit, lambda pair=pair: pair)
        for name, pair in pairs.items()
    )


def gradients(layer: StructuredLinear, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer.requires_grad_(True)
    y = layer(x)
    # the same weights in every dtype, so that only the layer's arithmetic differs
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(torch.bfloat16)
    y.backward(weights.to(y))
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize(("structure", "index"), EVERY)
def test_layouts(structure: str, index: int, on_cuda: str, judge: Judge) -> None:
    """A layer that lands on a GPU is in kernel layout, and gives its first state back."""
    spec = spec_of(structure, index)
    before = layer_of(spec, torch.float32, "cpu", bias=True)
    layer = copy.deepcopy(before).to(on_cuda)

    def rows() -> Iterator[Row]:
        for name in spec.shapes():
            factor, state = layer.get_parameter(name), layer.state_dict()[name]
            whole = with_zeros(factor, layer.wide[0]) if layer.wide else factor
            laid = in_order(whole, order_of(name, factor.dim()))
            case, strides = f"{spec.describe()} {name}", f"strides {factor.stride()}, {state.stride()}"
            yield row(laid and state.is_contiguous(), f"{structure} layout", case, strides)
            error = relative(state.cpu(), before.get_parameter(name).detach())
            yield bounded(f"{structure} layout", f"{case} as it was", error, 0.0)

    judge(rows())
