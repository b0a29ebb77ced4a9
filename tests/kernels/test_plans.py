"""A variant is chosen once for the shapes of a call; launches alone are done again without Triton's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blr.compressor import tune
from blr.compressor.tune import Candidate, Point, rules_of
from blr.kernels.blast.op import blast_linear
from blr.kernels.common import dispatch, inlining, replay, tables
from blr.kernels.common.available import has_triton
from blr.kernels.common.tables import Shape
from blr.kernels.lowrank import op as lowrank_op
from blr.kernels.monarch.op import monarch_linear

pytestmark = pytest.mark.fast
SHAPE = Shape(12, 10, 1, 4)


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, 4), torch.randn(4, 12).t(), torch.randn(10)


def test_a_shape_is_planned_once(factors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A new plan for another shape, dtype or bias, and after `forget`; none with gradients."""
    made: list[Any] = []
    usual = lowrank_op.plan
    monkeypatch.setattr(lowrank_op, "plan", lambda *given: made.append(given) or usual(*given))
    dispatch.forget()
    U, V, bias = factors
    wide = [t.double() for t in factors]
    with torch.no_grad():
        for x in (torch.randn(2, 3, 12), torch.randn(2, 3, 12), torch.randn(6, 12)):
            torch.testing.assert_close(lowrank_op.lowrank_linear(x, U, V, bias), x @ V @ U.T + bias)
        assert len(made) == 2
        lowrank_op.lowrank_linear(x, U, V)
        lowrank_op.lowrank_linear(x.double(), *wide)
        assert len(made) == 4
        dispatch.forget()
        lowrank_op.lowrank_linear(x, U, V)
        assert len(made) == 5
        with pytest.raises(TypeError, match="cast one of them"):
            lowrank_op.lowrank_linear(x, U, V, bias.double())
    made.clear()
    lowrank_op.lowrank_linear(x, U, V)
    assert made == []


@pytest.mark.parametrize("structure", ["lowrank", "monarch", "blast"])
def test_the_plain_form_runs_where_ours_is_not_faster(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured by a timer that says so: ours wins at 4 tokens, is within noise at 16, loses at 64; what
    runs between them is the choice of the next number above."""
    plain, *_ = tables.PLAIN[structure]
    ours = {"lowrank": "narrow", "monarch": "narrow", "blast": "narrow"}[structure]
    times = {4: (1.0, 2.0), 16: (1.0, 1.02), 64: (1.5, 1.0)}
    shape = Shape(64, 64, 1 if structure == "lowrank" else 4, 16)
    points = [
        Point(structure, shape, "float32", n, {ours: t[0], plain: t[1], "dense": 3.0})
        for n, t in times.items()
    ]
    rules = rules_of(points, {c.label: c for c in map(Candidate, (ours, plain, "dense"))})
    monkeypatch.setattr(tables, "tuned_rules", lambda gpu: rules)
    tables._choose.cache_clear()
    monkeypatch.setattr(dispatch, "kernel_device", lambda tensor: True)
    ran: list[str] = []
    table = {name: lambda x, bias, name=name: ran.append(name) or x for name in (ours, plain)}
    other = Shape(128, 64, shape.blocks, 8)  # not measured
    for size in (shape, other):
        ran.clear()
        for n in (1, 3, 4, 5, 16, 17, 64, 65, 5000):
            given = (torch.zeros(n, size.inputs), (), None)
            dispatch.dispatch(structure, size, lambda: table, None, *given)
        assert ran == [ours] * 3 + [plain] * 6
    monkeypatch.undo()
    dispatch.forget()


def test_every_plain_form_is_timed() -> None:
    for structure in ("svd", "monarch", "blast"):
        table, _ = tune.variants_of(structure)
        plain = tables.PLAIN[tables.FOLDERS[structure]]
        assert plain and set(plain) <= set(table)
        for n in tune.FULL:
            assert set(plain) <= {candidate.variant for candidate in tune.candidates(structure, n)}


# Replays, with a driver that notes what it is given.


class Compiled:
    """What Triton compiles, as far as replays know it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.ran.append(arguments)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Kernels are launched on a driver that only notes; the CPU is the current GPU."""
    from triton.runtime.jit import JITFunction

    made = Compiled()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: made)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # of the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return made


def launcher() -> Any:
    from triton.runtime.jit import JITFunction

    kernel: Any = object.__new__(JITFunction)
    kernel.arg_names = ["x", "both", "y", "n", "BLOCK"]
    return kernel


def variant(kernel: Any) -> Any:
    """Two launches; the second reads the factor two rows on."""

    def run(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        z = torch.empty(len(x), 4)
        y = torch.empty(len(x), 8)
        kernel[(3,)](x, (w, 5, z), z, 7, BLOCK=16)
        kernel[(2, 4)](z, (w[2:], 6, y), y, 8, BLOCK=32)
        return y

    return run


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_launches_are_done_again_at_other_addresses(compiled: Compiled) -> None:
    run = variant(launcher())
    x, w = torch.zeros(2, 12), torch.zeros(4, 8)
    y, found = replay.recorded(run, x, w, None)
    assert found is not None and y.shape == (2, 8)
    x, w = torch.zeros(2, 12), torch.zeros(4, 8)
    y = found(x, w, None)
    first, second = compiled.ran
    assert first[:9] == (3, 1, 1, 77, "function", "metadata", None, None, None)
    assert first[9:] == (x.data_ptr(), (w.data_ptr(), 5, first[11]), first[11], 7, 16)
    assert second[:4] == (2, 4, 1, 77)
    end = y.data_ptr()
    assert second[9:] == (first[11], (w.data_ptr() + 64, 6, end), end, 8, 32)
    assert len({x.data_ptr(), w.data_ptr(), first[11], end}) == 4


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_what_is_not_as_it_was_takes_the_usual_way(compiled: Compiled) -> None:
    run = variant(launcher())
    x, w = torch.zeros(2, 12), torch.zeros(4, 8)
    _, found = replay.recorded(run, x, w, None)
    assert found is not None
    assert found(torch.zeros(12, 2).t(), w, None) is None, "strides of the input"
    assert found(x, torch.zeros(8, 4).t(), None) is None, "strides of a factor"
    assert found(torch.zeros(26)[1:25].view(2, 12), w, None) is None, "an address that is not aligned"
    assert compiled.ran == []


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_more_than_launches_is_not_done_again(compiled: Compiled) -> None:
    kernel = launcher()
    run = variant(kernel)
    x, w = torch.zeros(2, 12), torch.zeros(4, 8)

    def with_descriptor(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(2, 8)
        kernel[(1,)](x, SimpleNamespace(base=w), y, 7, BLOCK=16)
        return y

    others = (
        lambda x, w, bias: run(x + 1, w, bias),
        lambda x, w, bias: run(x, w, bias).mul_(2),
        lambda x, w, bias: run(x, torch.zeros(4, 8), bias),
        lambda x, w, bias: torch.empty(2, 8),
        with_descriptor,
    )
    for other in others:
        assert replay.recorded(other, x, w, None)[1] is None


# What torch.compile is given.


@pytest.mark.parametrize("form", ["plain", "operator", "auto"])
def test_compilations_look_into_operators_where_they_are_told_to(
    form: str, factors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    import blr.compressor.modeling.layers  # noqa: F401 (which tells inductor of the operators)

    torch.manual_seed(0)
    monkeypatch.setenv(inlining.VARIABLE, form)
    U, V, bias = factors
    blocks = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    S, x = torch.randn(2, 2, 4), torch.randn(3, 12)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def run(x: Tensor) -> list[Tensor]:
        low = lowrank_op.lowrank_linear(x, U, V, bias)
        return [low, monarch_linear(x, *blocks), blast_linear(x, blocks[0], S, blocks[1])]

    with torch.no_grad():
        backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
        torch._dynamo.reset()
        found = torch.compile(run, fullgraph=True, backend=backend, dynamic=False)(x)
        torch.testing.assert_close(found, run(x))
    ours = [str(n.target) for n in graphs[0].graph.nodes if str(n.target).startswith("blr.")]
    assert len(ours) == (0 if form == "plain" else 3)


def test_forms_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table's choice for a known number of tokens, where kernels run."""
    chosen = {4: "narrow", 64: "gemm"}
    monkeypatch.setattr(inlining, "kernel_device", lambda x: True)
    monkeypatch.setattr(inlining, "choose", lambda s, shape, n, dtype, device: (chosen[n], {}))
    assert not inlining.is_plain("lowrank", SHAPE, torch.zeros(4, 12))
    assert inlining.is_plain("lowrank", SHAPE, torch.zeros(64, 12))
    monkeypatch.setattr(inlining, "kernel_device", lambda x: False)
    assert not inlining.is_plain("lowrank", SHAPE, torch.zeros(64, 12))
    monkeypatch.setenv(inlining.VARIABLE, "fast")
    with pytest.raises(RuntimeError, match="'fast': expected one of auto, plain, operator"):
        inlining.is_plain("lowrank", SHAPE, torch.zeros(64, 12))
