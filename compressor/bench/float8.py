"""Layers in float8: activations are quantized in every call, its time counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blr.compressor.bench.harness import Arm
from blr.compressor.bench.layer_problem import LayerProblem, reference_of
from blr.compressor.bench.timing import Call, Rotation
from blr.compressor.modeling.float8 import prepared, structure_of
from blr.compressor.modeling.quantized import quantized_layer
from blr.compressor.structures.packing import pack_factor, unpack_factor
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec, Spec
from blr.kernels.common.available import HALF
from blr.kernels.common.names import FOLDERS
from blr.kernels.decode.quantized.formats import ROW
from blr.kernels.fp8.op import STRUCTURES as FLOAT8
from blr.kernels.fp8.op import fp8_device, fp8_product, fp8_rows

LIMIT = 0.1  # relative error: 0.038 of one product, 0.053 of two


def float8_arms(layer: LayerProblem, spec: Spec | None) -> Iterator[Arm]:
    """The arm of a layer, dense if `spec` is None, where the device multiplies in float8."""
    structure = "dense" if spec is None else FOLDERS[spec.structure]
    half = layer.timer.precision.dtype in HALF
    if structure in FLOAT8 and half and fp8_device(layer.timer.device):
        name = "dense-fp8" if spec is None else "fp8"
        yield layer.arm(name, lambda: rounding_call(layer, spec), limit=LIMIT)


def float8_layer(plain: Spec, factors: dict[str, Tensor], bias: Tensor | None = None) -> Any:
    """A layer with canonical `factors` rounded to float8, a scale a row."""
    spec, tensors = _stored(plain, factors)
    with torch.device("meta"):
        made = quantized_layer(spec, bias is not None)
    made.load_state_dict(tensors if bias is None else tensors | {"bias": bias}, assign=True)
    return made.requires_grad_(False).eval()


def rounding_call(layer: LayerProblem, spec: Spec | None) -> tuple[Call, Rotation]:
    """A layer with float8 weights, dense if `spec` is None, on inputs that it rounds."""
    made = float8_layer(*_factors(layer, spec))
    structure = structure_of(made)
    scales, weights = prepared(made, structure, layer.x())

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return fp8_product(structure, fp8_rows(x), weights, scales, x.dtype)

    return call, layer.rotate(weights)


def dequantizing_call(layer: LayerProblem, spec: Spec | None) -> tuple[Call, Rotation]:
    """The same on inputs as they are, its weights dequantized at every call."""
    plain, factors = _factors(layer, spec)
    packing, stored = _stored(plain, factors)
    product = reference_of("dense") if spec is None else STRUCTURES[spec.structure].product()

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        held = dict(zip(stored, weights, strict=True))
        return product(x, *(unpack_factor(packing, name, held, x.dtype) for name in factors))

    return call, layer.rotate(list(stored.values()))


def _factors(layer: LayerProblem, spec: Spec | None) -> tuple[Spec, dict[str, Tensor]]:
    plain = spec or DenseSpec(layer.row.in_features, layer.row.out_features)
    return plain, dict(zip(plain.shapes(), layer.factors(), strict=True))


def _stored(plain: Spec, factors: dict[str, Tensor]) -> tuple[QuantizedSpec, dict[str, Tensor]]:
    spec = QuantizedSpec(plain, 8, ROW, fp8=True)
    packed = (pack_factor(spec, name, factor, factor.dtype) for name, factor in factors.items())
    return spec, {name: tensor for found in packed for name, tensor in found.items()}
