"""Small structured layers of every kind, canonical and in kernel layout."""

from __future__ import annotations

import copy
from typing import Any

import torch

from blr.compressor.modeling.layers import StructuredLinear, make_layer

SPECS: dict[str, dict[str, Any]] = {
    "svd": {"structure": "svd", "in_features": 20, "out_features": 12, "rank": 3},
    "svd-out": {
        **{"structure": "svd", "in_features": 20, "out_features": 12, "rank": 3},
        **{"groups": 4, "side": "out"},
    },
    "svd-in": {
        **{"structure": "svd", "in_features": 20, "out_features": 12, "rank": 3},
        **{"groups": 5, "side": "in"},
    },
    "monarch": {
        **{"structure": "monarch", "in_features": 20, "out_features": 12},
        **{"blocks": 4, "block_rank": 2},
    },
    "blast": {"structure": "blast", "in_features": 20, "out_features": 12, "blocks": 4, "rank": 5},
    "ks": {
        **{"structure": "ks", "in_features": 20, "out_features": 12},
        **{"patterns": [[2, 6, 5, 1], [1, 5, 10, 2]]},
    },
}


@torch.no_grad()
def to_kernel_layout(layer: StructuredLinear) -> None:
    """Turn a canonical layer in place into the one of the same values that an export holds."""
    made = StructuredLinear(layer.spec, layer.bias is not None, exported=True).to(layer.like())
    for name, factor in made.held.items():
        canonical, (stored,) = layer.factor(name), made.stored(factor)
        order = sum(factor.axes, ()) or (0,)
        stored.data = canonical.permute(order).contiguous()
        stored.requires_grad_(canonical.requires_grad)
    made.bias = layer.bias
    layer.__dict__.clear()
    layer.__dict__.update(made.__dict__)


def pair(name: str) -> tuple[StructuredLinear, StructuredLinear]:
    """A canonical layer with a bias and its copy in kernel layout."""
    torch.manual_seed(0)
    layer = make_layer(SPECS[name], bias=True)
    torch.nn.init.normal_(layer.bias)
    kernel = copy.deepcopy(layer)
    to_kernel_layout(kernel)
    return layer, kernel
