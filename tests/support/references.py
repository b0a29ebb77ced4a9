"""Structured layers computed by their references, wherever they are: what results are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.ranks import RankRequest, in_ranks
from blr.compressor.structures.registry import STRUCTURES


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """No structured layer of `model` runs a kernel while active."""
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    for layer in layers:
        layer.forward = partial(_product, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _product(layer: StructuredLinear, x: Any) -> Any:
    if isinstance(x, RankRequest):
        return in_ranks(x.x, layer.U, layer.V, layer.bias)
    return STRUCTURES[layer.spec.structure].reference(layer.spec)(x, *layer.ordered(), bias=layer.bias)
