"""Norms, gates and rotations of compressed models as one kernel each, on the GPU: the logits stay."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from plain_kernels import activated as plain
from tolerances import TOLERANCES
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from blr.compressor.modeling.cuda_graphs import ForwardGraphs, captured
from blr.compressor.modeling.fused import fuse
from blr.kernels.fused import launch as launching
from blr.kernels.fused.launch import activated, layer_norm

pytestmark = pytest.mark.gpu
SIZES = {"vocab_size": 600, "hidden_size": 256, "intermediate_size": 1000, "num_hidden_layers": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 1030])
def test_logits_stay(on_cuda: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).to(on_cuda, dtype).eval()
    fused = deepcopy(model)
    fuse(fused)
    ids = torch.randint(600, (2, tokens), device=on_cuda)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        found = fused(ids).logits
    with torch.no_grad():
        exact = deepcopy(model).double()(ids).logits
        native = model(ids).logits
    error, usual = (float((y - exact).norm() / exact.norm()) for y in (found, native))
    assert error <= max(1.1 * usual, TOLERANCES[dtype])
    counts = {e.key: e.count for e in seen.key_averages()}
    assert counts["gated_kernel"] == counts["rotary_kernel"] == 2, "one a layer"
    for _ in range(3):  # launches that are done again
        ids = torch.randint(600, (2, tokens), device=on_cuda)
        with torch.no_grad():
            found, native = fused(ids).logits, model(ids).logits
        assert float((found - native).norm() / native.norm()) <= 2 * max(usual, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norms_are_torchs(
    on_cuda: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "LEAST", 1)
    torch.manual_seed(0)
    for n, width in ((1, 8), (33, 384), (5, 1000), (70, 768), (3, 4096)):
        x = (3 + torch.randn(n, width + 8, device=on_cuda)).to(dtype)[:, :width]
        weight, bias = torch.randn(2, width, device=on_cuda).to(dtype)
        for shift in (None, bias):
            given = (weight.double(), None if shift is None else shift.double(), 1e-5)
            exact = torch.nn.functional.layer_norm(x.double(), weight.shape, *given)
            found = layer_norm(x, weight, shift, 1e-5)
            assert float((found - exact).norm() / exact.norm()) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_activations_are_torchs(on_cuda: str, dtype: torch.dtype) -> None:
    """Ranks that no tile divides, rows that lie apart, other inputs at launches that are done again."""
    torch.manual_seed(0)
    for n, k, m in ((1024, 192, 768), (1500, 304, 1000), (2731, 768, 3072)):
        weight, bias = (torch.randn(m, k, device=on_cuda) / k**0.5).to(dtype), torch.randn(m).to(dtype)
        for activation in ("gelu", "gelu_tanh", "silu", "relu"):
            for shift in (None, bias.to(on_cuda)):
                for _ in range(3):
                    x = torch.randn(2, n // 2, k + 8, device=on_cuda).to(dtype)[..., :k]
                    wide = None if shift is None else shift.double()
                    exact = plain(x.double(), weight.double(), wide, activation)
                    found = activated(x, weight, shift, activation)
                    assert float((found - exact).norm() / exact.norm()) <= TOLERANCES[dtype]


def test_random_numbers_go_on_after_a_capture_that_failed(on_cuda: str) -> None:
    def waits(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * float(torch.rand(1, device=on_cuda).item())}

    graphs, x = ForwardGraphs(captured), torch.ones(2, device=on_cuda)
    with torch.no_grad():
        graphs.run(waits, ((x,), {}))
    assert graphs.failed and float(torch.rand(8, device=on_cuda).std()) > 0
