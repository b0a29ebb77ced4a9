"""What `torch.compile` is given of our operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blr.kernels.common import inlining
from blr.kernels.common.tables import Shape
from blr.kernels.layers.blast.op import blast_linear
from blr.kernels.layers.lowrank import op as lowrank_op
from blr.kernels.layers.monarch.op import monarch_linear

SHAPE = Shape(12, 10, 1, 4)


@pytest.fixture
def factors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(10, 4), torch.randn(4, 12).t(), torch.randn(10)


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
    assert all("_bare" in name for name in ours), "without gradients, which are calls of Python"


def test_graphs_kept_on_the_disk_are_those_of_a_form() -> None:
    """Torch's key of them does not say what an operator is taken apart into."""
    with torch.compiler.config.patch(cache_key_tag="theirs "):
        for form, tag in (("", "theirs "), ("plain", "theirs BLR_COMPILED=plain")):
            for _ in range(2):  # a checkpoint's own code is another copy
                inlining._mark_caches(form)
            assert torch.compiler.config.cache_key_tag == tag


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


def test_calls_that_take_longer_than_the_gpu_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a few tokens and many, but not where a CUDA graph calls nothing."""
    from torch._inductor import config

    monkeypatch.setattr(inlining, "kernel_device", lambda x: True)
    monkeypatch.setattr(inlining, "choose", lambda *_: ("ours", {}))
    shape = Shape(4096, 4096, 16, 128)
    for structure, most in (("monarch", 2441), ("blast", 1220), ("lowrank", 0)):
        for n in (1, 64, 65, 1000, 2000, 3000):
            x = torch.empty(n, 1)
            assert inlining.is_plain(structure, shape, x) == (64 < n <= most)
    with config.patch({"triton.cudagraphs": True}):
        assert not inlining.is_plain("monarch", shape, torch.empty(100, 1))
