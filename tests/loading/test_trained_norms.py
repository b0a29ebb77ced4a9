"""Fused norms compute what transformers' do, gradients too; what computes something else is left."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blr.compressor.loading.load import load_model
from blr.compressor.modeling.fused import fuse_trained


def fused_norms(model: nn.Module) -> int:
    """How many norms of `model` compute by a function of ours once it is fused."""
    fuse_trained(model)
    return sum(
        "Norm" in type(module).__name__ and "forward" in vars(module) for module in model.modules()
    )


def test_the_same_answers_and_gradients(tiny: Path) -> None:
    models = [load_model(tiny, "AutoModelForCausalLM", dtype="float32", device="cpu") for _ in range(2)]
    assert fused_norms(models[1]) == 9, "two a block and the last"
    ids, found = torch.randint(128, (2, 12)), []
    for model in models:
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_other_norms_are_left_alone() -> None:
    class RMSNormOfSquares(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) ** 2

    gemma = GemmaRMSNorm(16)
    nn.init.normal_(gemma.weight)
    model = nn.ModuleList([gemma, RMSNormOfSquares(16), nn.LayerNorm(16)])
    assert fused_norms(model) == 0
    assert fused_norms(nn.ModuleList([LlamaRMSNorm(16).bfloat16(), LlamaRMSNorm(16)])) == 2


def test_a_gated_norm_keeps_its_gate() -> None:
    torch.manual_seed(0)
    norms = [FalconH1RMSNormGated(16, n_groups=1, norm_before_gate=before) for before in (False, True)]
    x, gate = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    expected = [(norm(x), norm(x, gate), norm(x, gate=gate)) for norm in norms]
    fuse_trained(nn.ModuleList(norms))
    assert any("forward" in vars(norm) for norm in norms), "the premise: one is taken for a plain norm"
    for norm, wanted in zip(norms, expected, strict=True):
        torch.testing.assert_close((norm(x), norm(x, gate), norm(x, gate=gate)), wanted)
