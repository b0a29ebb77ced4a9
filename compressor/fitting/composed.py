"""Passes of structured layers through their dense weight, made anew for every one.

Thousands of tokens share the factors: the weight costs as much as r tokens, and one product with it
is faster than a chain of small ones and keeps nothing but its input for the backward pass. Low-rank
layers stay as they are, with pivots or without: their two products are as large as they are few.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.fitting.equal_weights import Sum
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.registry import STRUCTURES

PLAIN = ("svd", "pivoted")


def compose_layers(model: nn.Module, widest: int | None = None) -> None:
    """Make the structured layers of `model` compute by their dense weights; of those whose inputs and
    outputs together are more than `widest` none."""
    for module in model.modules():
        if widest is not None and _width(module) > widest:
            continue
        if isinstance(module, Sum):
            module.forward = partial(_forward_sum, module)  # type: ignore[method-assign]
        elif isinstance(module, StructuredLinear) and module.spec.structure not in PLAIN:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _width(module: nn.Module) -> int:
    """Inputs and outputs of a structured layer, alone or as a correction."""
    layer = module.correction if isinstance(module, Sum) else module
    return layer.spec.in_features + layer.spec.out_features if isinstance(layer, StructuredLinear) else 0


def dense_weight(layer: StructuredLinear) -> Tensor:
    """The weight [o, i], differentiable."""
    held = dict(zip(layer.held, layer.ordered(), strict=True))
    return STRUCTURES[layer.spec.structure].factorizer().reconstruct(held, layer.spec)


def _forward_sum(layer: Sum, x: Tensor) -> Tensor:
    base, correction = layer.base, layer.correction
    assert isinstance(base, nn.Linear) and isinstance(correction, StructuredLinear)
    return linear(x, base.weight + dense_weight(correction), layer.bias)


def _forward(layer: StructuredLinear, x: Tensor) -> Tensor:
    return linear(x, dense_weight(layer), layer.bias)
