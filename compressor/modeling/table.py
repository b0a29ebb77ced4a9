"""From an entry of the table of layers in config.json to a layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.modeling.kernel_layout import to_kernel_layout
from blr.compressor.modeling.layers import LAYERS, StructuredLinear
from blr.compressor.modeling.modeling_blr import replace_layers as replace_by
from blr.compressor.modeling.quantized import QuantizedLinear, QuantizedStructured, quantized_layer
from blr.compressor.structures.specs import CorrectedSpec, QuantizedSpec, Spec, spec_from_dict

Replaced = StructuredLinear | QuantizedLinear | CorrectedLinear


def layer_of(spec: Spec, bias: bool) -> Replaced:
    """An empty layer that holds what `spec` says."""
    if isinstance(spec, CorrectedSpec):
        return CorrectedLinear(spec, bias)
    if isinstance(spec, QuantizedSpec):
        return quantized_layer(spec, bias)
    return LAYERS[type(spec)](spec, bias)


def make_layer(entry: dict[str, Any], bias: bool, exported: bool = False) -> Replaced:
    """The same of an entry of the table; `exported`: float factors lie as the kernels read them."""
    made = layer_of(spec_from_dict(entry), bias)
    for layer in [m for m in made.modules() if exported and isinstance(m, StructuredLinear)]:
        if not isinstance(layer, QuantizedStructured):
            to_kernel_layout(layer)
    return made


def replace_layers(model: nn.Module, table: dict[str, dict[str, Any]]) -> None:
    """Put layers with the kernels of this package in the places that a table of entries names."""
    replace_by(model, table, make_layer)
