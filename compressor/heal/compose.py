"""Training passes of structured layers through their dense weight, made anew for every micro-batch.

Thousands of tokens share the factors: the weight costs as much as r tokens, and one product with it
is faster than a chain of small ones and keeps nothing but its input for the backward pass. Low-rank
layers stay as they are, with pivots or without: their two products are as large as they are few.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.fitting.twins import Sum
from blr.compressor.modeling.layers import LowRankLinear, PivotedLinear, StructuredLinear
from blr.compressor.structures.registry import STRUCTURES

PLAIN = (LowRankLinear, PivotedLinear)


def compose_layers(model: Any) -> None:
    """Make the structured layers of `model` compute by their dense weights."""
    for module in model.modules():
        if isinstance(module, Sum):
            module.forward = partial(_forward_sum, module)  # type: ignore[method-assign]
        elif isinstance(module, StructuredLinear) and not isinstance(module, PLAIN):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def dense_weight(layer: StructuredLinear) -> Tensor:
    """The weight [o, i], differentiable."""
    names = (*layer.spec.shapes(), *layer.spec.indices())
    held = dict(zip(names, layer.ordered(), strict=True))
    return STRUCTURES[layer.spec.structure].factorizer().reconstruct(held, layer.spec)


def _forward_sum(layer: Sum, x: Tensor) -> Tensor:
    base, correction = layer.base, layer.correction
    assert isinstance(base, nn.Linear) and isinstance(correction, StructuredLinear)
    return linear(x, base.weight + dense_weight(correction), layer.bias)


def _forward(layer: StructuredLinear, x: Tensor) -> Tensor:
    return linear(x, dense_weight(layer), layer.bias)


def blocks_of(model: Any) -> list[Any]:
    """The model's blocks: its longest list of modules."""
    lists = [list(m) for m in model.modules() if type(m) is nn.ModuleList and len(m) > 1]
    return max(lists, key=len, default=[])


def checkpoint_blocks(model: Any) -> None:
    """Keep only the inputs of the model's blocks for the backward pass.

    transformers' own checkpointing needs training mode, with its dropout.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: Any) -> None:
    """Compile the model's blocks, each on its own."""
    torch._dynamo.config.cache_size_limit = 64  # ranks differ from block to block
    for block in blocks_of(model):
        block.compile(dynamic=False)
