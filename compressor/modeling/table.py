"""From the table of layers in config.json to the layers in a model. Shipped in every checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.modeling.float8_makers import share_rows
from blr.compressor.modeling.layers import LAYERS, StructuredLinear
from blr.compressor.modeling.quantized import QuantizedLinear, quantized_layer
from blr.compressor.modeling.replacing import replace_modules
from blr.compressor.structures.specs import CorrectedSpec, QuantizedSpec, Spec, spec_from_dict

Replaced = StructuredLinear | QuantizedLinear | CorrectedLinear


def layer_of(spec: Spec, bias: bool) -> Replaced:
    """An empty layer that holds what `spec` says."""
    if isinstance(spec, CorrectedSpec):
        return CorrectedLinear(spec, bias)
    if isinstance(spec, QuantizedSpec):
        return quantized_layer(spec, bias)
    return LAYERS[type(spec)](spec, bias)


def replace_layers(model: nn.Module, layers: dict[str, dict[str, Any]]) -> None:
    """Put a layer of ours in the place of every module that `layers` names.

    Args:
        model: any module tree, on any device (usually meta).
        layers: module name to the fields of its spec.

    Raises:
        KeyError: a name that is not a module of `model`.
    """
    replace_modules(model, layers, lambda fields, bias: layer_of(spec_from_dict(fields), bias))
    share_rows(model)
