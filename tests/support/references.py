"""Structured layers computed by their references, wherever they are: what results are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from blr.bench.products import reference_of
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.ranks import RankRequest, in_ranks
from blr.kernels.layers.lowrank.reference import grouped_lowrank_linear


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
    if (side := layer.entry.get("side")) is not None:
        return grouped_lowrank_linear(x, *layer.ordered(), layer.bias, side=side)
    return reference_of(layer.spec.structure)(x, *layer.ordered(), bias=layer.bias)
