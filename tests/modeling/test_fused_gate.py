"""Fused gates of MLPs: the same numbers, in loaded models; the native module where it is to compute."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from exporting import compress_to
from pico import save_pico
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from blr.compressor.loading.load import load_model
from blr.compressor.modeling import fused as ours
from blr.compressor.modeling.fused import FusedGate, FusedNorm, FusedRotary, fuse_gates
from blr.kernels.fused.reference import GATES

pytestmark = pytest.mark.fast
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()


def mlp(kind: type[nn.Module] = LlamaMLP, act: str = "silu") -> nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=8, intermediate_size=24, hidden_act=act, num_attention_heads=1)
    config.hidden_activation = act
    return kind(config).bfloat16()


@pytest.mark.parametrize(("kind", "act"), [(LlamaMLP, "silu"), (GemmaMLP, "gelu_pytorch_tanh")])
def test_the_same_numbers_by_the_kernel(
    kind: type[nn.Module], act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = mlp(kind, act)
    fused = pickle.loads(pickle.dumps(native))
    fuse_gates(fused)
    assert isinstance(fused, FusedGate) and type(fused).__name__ == kind.__name__
    taken: list[str] = []

    def counted(gate: torch.Tensor, up: torch.Tensor, make: str) -> torch.Tensor:
        taken.append(make)
        return GATES[make](gate, up)

    monkeypatch.setattr(ours, "gated", counted)
    with torch.no_grad():
        assert torch.equal(fused(X), native(X)) and not taken, "on a CPU it is the module itself"
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        assert torch.equal(pickle.loads(pickle.dumps(fused))(X), native(X)) and len(taken) == 1
        native.float(), fused.float()
        assert torch.equal(fused(X.float()), native(X.float())) and len(taken) == 1
    assert torch.equal(fused(X.float()), native(X.float())) and len(taken) == 1, "for gradients, too"


def test_other_mlps_are_left_alone() -> None:
    class Scaled(LlamaMLP):
        """With more in it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.ModuleList([mlp(Scaled), mlp(act="relu"), nn.Linear(8, 8)])
    fuse_gates(model)
    assert not any(isinstance(module, FusedGate) for module in model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_models_are_fused_whatever_they_are_loaded_in(dtype: str, tmp_path: Path) -> None:
    """transformers makes them under their dtype as the default one, in which modules are asked, too."""
    folder = compress_to(save_pico("llama", tmp_path / "model"), tmp_path / "out", method="svd", cf=1.5)
    model = load_model(folder, "AutoModelForCausalLM", dtype=dtype, device="cpu")
    found = [sum(isinstance(m, kind) for m in model.modules()) for kind in (FusedGate, FusedRotary)]
    assert found == 2 * [model.config.num_hidden_layers]
    assert sum(isinstance(m, FusedNorm) for m in model.modules()) == 2 * found[0] + 1
