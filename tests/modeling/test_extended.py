"""Modules with methods of ours: what others read of their classes is the native one's."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from structured import structured_model
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.rank_attention import keep_ranks
from blr.compressor.modeling.slices import bound_norms

pytestmark = pytest.mark.fast
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


class Twice(Extension):
    def forward(self: Any, x: Tensor) -> Tensor:
        """As of the module."""
        native: Any = super()
        return 2 * native.forward(x)


class Shifted(Extension):
    def forward(self: Any, x: Tensor) -> Tensor:
        """As of the module."""
        native: Any = super()
        return native.forward(x) + 1


def test_signature_and_source_are_the_native_ones() -> None:
    """vLLM's Transformers backend takes a module for attention by the source of its forward."""
    model = LlamaModel(LlamaConfig(vocab_size=40, **SIZES))
    fuse(model)
    bound_norms(model)
    found: list[Any] = [type(m) for m in model.modules() if isinstance(m, Extension)]
    assert {made.__name__ for made in found} == {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}
    structured = structured_model("llama")
    keep_ranks(structured)
    found += [type(m) for m in structured.modules() if isinstance(m, Extension)]
    for made in found:
        assert inspect.unwrap(made.forward) is inspect.unwrap(made.native.forward)
        assert inspect.signature(made.forward) == inspect.signature(made.native.forward)


def test_the_last_mixin_calls_those_before_it() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    y = layer(x)
    for mixin in (Twice, Shifted, Twice):
        extend(layer, mixin)
    torch.testing.assert_close(layer(x), 2 * y + 1)
    torch.testing.assert_close(copy.deepcopy(layer)(x), 2 * y + 1)
