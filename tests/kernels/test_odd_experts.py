"""Experts in few bits whose inputs are infinite give what plain weights give. Interpreter only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blr.kernels.common.available import has_triton
from blr.kernels.decode.quantized.reference import dequantize, quantize
from blr.kernels.layers.experts.op import Weight, add_mixed, expert_mixed, expert_products, stack_of

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
    pytest.mark.filterwarnings("ignore:invalid value"),
]
EXPERTS, ROWS, K, GROUP = 3, 18, 200, 64
HALF = torch.float16


def kinds(y: Tensor) -> Tensor:
    """0 of a finite number, 1 of NaN, 2 and 3 of infinities."""
    return y.isnan() + 2 * y.isposinf() + 3 * y.isneginf()


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_infinite_inputs(bits: int, ranks: int) -> None:
    """Of products, of their gates and of their sums, alone and added; other tokens stay as they are."""
    torch.manual_seed(bits)
    weights, dense = [], []
    for _ in range(EXPERTS):
        packed, scale = quantize(torch.randn(ROWS, K), bits, HALF, GROUP, curved=False)
        factors = (torch.randn(ROWS, ranks).to(HALF), torch.randn(ranks, K).to(HALF)) if ranks else ()
        weights.append([Weight(packed, scale, *factors)])
        dense.append((dequantize(packed, scale, bits, K, torch.float32, GROUP, False), factors))
    stack = stack_of(weights, ROWS, K, bits, GROUP, False)

    def plain(x: Tensor, n: int) -> Tensor:
        w, factors = dense[n]
        y = x.float() @ w.T
        return y + x.float() @ factors[1].float().T @ factors[0].float().T if factors else y

    x, chosen = torch.randn(3, K).to(HALF), torch.tensor([2, 0, 0, 1, 2, 2])
    x[0, 7], x[1, 150] = torch.inf, -torch.inf
    pairs = x.repeat_interleave(2, 0)
    expected = torch.stack([plain(row, n) for row, n in zip(pairs, chosen.tolist(), strict=True)])
    assert expected[:4].isinf().any() and expected[4:].isfinite().all()
    share = torch.rand(3, 2)
    sums = (expected.view(3, 2, -1) * share[..., None]).sum(1)
    with torch.no_grad():
        y = expert_products(x, chosen, stack)
        gated = expert_products(x, chosen, stack, "geglu")
        mixed = expert_mixed(pairs, chosen, share, stack)
        add_mixed(pairs, chosen, share, stack, held := torch.ones(3, ROWS))
    gate, up = expected.chunk(2, -1)
    inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
    for found, right in ((y, expected), (mixed, sums), (held, sums + 1)):
        assert torch.equal(kinds(found), kinds(right))
        finite = right.isfinite()
        assert (found[finite] - right[finite]).norm() <= 2e-3 * right[finite].norm()
    assert torch.equal(gated.isfinite(), inner.isfinite())
