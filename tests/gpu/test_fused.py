"""Norms, gates and rotations of compressed models as one kernel each, on the GPU: the logits stay."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from tolerances import TOLERANCES
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from blr.compressor.modeling.fused import fuse

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
