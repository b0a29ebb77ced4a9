"""Fused rotations: the same numbers in whole models; the native function wherever it is to compute."""

from __future__ import annotations

import pickle
from functools import wraps
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.utils.deprecation import deprecate_kwarg

from blr.compressor.modeling import fused as ours
from blr.compressor.modeling.fused import FusedRotary, behind_renaming, fuse_rotary
from blr.compressor.modeling.settings import CACHE_NAMES
from blr.kernels.fused.reference import rotate

pytestmark = pytest.mark.fast
IDS = torch.arange(14).view(2, 7)
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SIZES = {
    **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=None, **more)
    return getattr(transformers, f"{name}Model")(config).bfloat16().eval()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of queries that our function rotated; everything looks like a GPU's."""
    seen: list[torch.Size] = []

    def counted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(q.shape)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    monkeypatch.setattr(ours, "rotated", counted)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return seen


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Phi3"])
def test_the_same_numbers_by_the_kernel(name: str, taken: list[torch.Size]) -> None:
    native = model_of(name)
    fused = pickle.loads(pickle.dumps(native))
    fuse_rotary(fused)
    fused = pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        assert torch.equal(fused(IDS).last_hidden_state, native(IDS).last_hidden_state)
        assert not native.training and len(taken) == 2, "of this model alone"
        assert torch.equal(fused.float()(IDS)[0], native.float()(IDS)[0]) and len(taken) == 2
    fused(IDS).last_hidden_state.sum().backward()
    assert len(taken) == 2, "for gradients, too"


@pytest.mark.parametrize(
    ("name", "rotated"), [("GPTNeoX", 0), ("Glm4Moe", 0), ("StableLm", 2), ("Phi", 2)]
)
def test_where_a_part_of_the_features_is_rotated(
    name: str, rotated: int, taken: list[torch.Size]
) -> None:
    """The model's function takes that part, or its attention does before it calls the function."""
    native = model_of(name, rope_parameters=PARTIAL, head_dim=4)
    fused = pickle.loads(pickle.dumps(native))
    fuse_rotary(fused)
    assert any(isinstance(module, FusedRotary) for module in fused.modules())
    with torch.no_grad():
        assert torch.equal(fused(IDS).last_hidden_state, native(IDS).last_hidden_state)
    assert len(taken) == rotated


def test_behind_what_renames_arguments(taken: list[torch.Size]) -> None:
    """As transformers 5.24 does with the old name of a cache: that name goes by the native module."""
    model = model_of("Llama")
    native = behind_renaming(type(model.layers[0].self_attn).forward)
    renaming = deprecate_kwarg("old", "9.0.0", new_name="attention_mask")(native)

    def renamed(forward: Any) -> None:
        for layer in model.layers:
            layer.self_attn.__class__ = type("Renaming", (type(layer.self_attn),), {"forward": forward})

    renamed(renaming)
    with torch.no_grad():
        wanted = model(IDS).last_hidden_state
        fuse_rotary(model)
        assert torch.equal(model(IDS).last_hidden_state, wanted) and len(taken) == 2
        hidden = torch.randn(2, 7, 16, dtype=torch.bfloat16)
        turned = model.rotary_emb(hidden, IDS)
        unknown = next(name for name in CACHE_NAMES if name not in signature(native).parameters)
        model.layers[0].self_attn(hidden, turned, attention_mask=None, **{unknown: None})
    assert len(taken) == 2


def test_behind_anything_else_it_is_left_alone() -> None:
    model = model_of("Llama")
    native = type(model.layers[0].self_attn).forward

    @wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return native(self, *args, **kwargs)

    model.layers[0].self_attn.__class__ = type(
        "Other", (type(model.layers[0].self_attn),), {"forward": forward}
    )
    fuse_rotary(model)
    assert [isinstance(layer.self_attn, FusedRotary) for layer in model.layers] == [False, True]


def test_other_rotations_are_left_alone() -> None:
    """Of pairs that lie together, of a part of the features, of none."""
    for model in (model_of("Cohere"), transformers.GPT2Model(transformers.GPT2Config(n_layer=1))):
        fuse_rotary(model)
        assert not any(isinstance(module, FusedRotary) for module in model.modules())
