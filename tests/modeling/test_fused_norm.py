"""Fused norms: the same numbers, in loaded models; the native module wherever it is to compute."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blr.compressor.modeling import fused as ours
from blr.compressor.modeling.fused import FusedLayerNorm, FusedNorm, fuse_norms, is_fused

pytestmark = pytest.mark.fast


def norm(kind: type[nn.Module] = LlamaRMSNorm, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    made = kind(48)
    nn.init.normal_(made.weight)
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_numbers_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    native = norm(dtype=dtype)
    fused = pickle.loads(pickle.dumps(native))
    fuse_norms(fused)
    assert isinstance(fused, FusedNorm) and type(fused).__name__ == "LlamaRMSNorm"
    x = 30 * torch.randn(3, 5, 48).to(dtype)
    assert torch.equal(fused(x), native(x)), "on a CPU it is the module itself"
    monkeypatch.setattr(ours, "is_fused", lambda *_: True)
    exact = pickle.loads(pickle.dumps(native)).double()(x.double())
    assert (fused(x) - exact).abs().max() <= (native(x) - exact).abs().max() * 1.01
    again = pickle.loads(pickle.dumps(fused))
    assert torch.equal(again(x), fused(x))


def test_other_norms_are_left_alone() -> None:
    others = [nn.LayerNorm((4, 48)), nn.LayerNorm(48, elementwise_affine=False)]
    model = nn.ModuleList([norm(GemmaRMSNorm), *others, nn.Linear(48, 48)])
    fuse_norms(model)
    assert not any(isinstance(module, FusedNorm | FusedLayerNorm) for module in model)


def test_layer_norms_of_many_rows_are_one_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    native = norm(nn.LayerNorm)
    fused = pickle.loads(pickle.dumps(native))
    fuse_norms(fused)
    assert isinstance(fused, FusedLayerNorm) and type(fused).__name__ == "LayerNorm"
    x, ran = torch.randn(3, 48).bfloat16(), []
    for many in (False, True):
        monkeypatch.setattr(ours, "is_fused", lambda *_: True)
        monkeypatch.setattr(ours, "is_faster", lambda _, many=many: many)
        monkeypatch.setattr(ours, "layer_norm", lambda *given: ran.append(given) or native(x))
        assert torch.equal(fused(x), native(x)) and len(ran) == many
    assert ran[0] == (x, fused.weight, fused.bias, native.eps)


def test_gradients_and_single_precision_are_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 48, dtype=torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with torch.no_grad():
        assert is_fused(x, weight)
        assert not is_fused(x.float(), weight.float()) and not is_fused(x, weight.float())
    assert not is_fused(x, weight)
