"""Arms of `blr bench layers` in float8: activations are quantized in every call, its time counted."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.bench.runner import Arm
from blr.compressor.bench.subjects import Subject, our_call, reference_of
from blr.compressor.bench.timing import Call, Rotation
from blr.compressor.modeling.float8 import prepared, structure_of
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.packing import pack_factor, unpack_factor
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec, Spec
from blr.kernels.common.available import HALF
from blr.kernels.common.names import FOLDERS
from blr.kernels.decode.quantized.formats import ROW
from blr.kernels.fp8.op import STRUCTURES, fp8_device, fp8_product, fp8_rows

TORCHAO = "torchao"
LIMIT = 0.1  # relative error: 0.038 of one product, 0.053 of two


def float8_arms(subject: Subject, spec: Spec | None, device: torch.device) -> Iterator[Arm]:
    """The arm of a layer, dense if `spec` is None, where the device multiplies in float8."""
    structure = "dense" if spec is None else FOLDERS[spec.structure]
    half = getattr(torch, subject.fields["dtype"], None) in HALF
    if structure in STRUCTURES and half and fp8_device(device):
        name = "dense-fp8" if spec is None else "fp8"
        yield subject.arm(name, lambda: rounding_call(subject, spec), limit=LIMIT)
        if spec is None and find_spec(TORCHAO) is not None:
            yield subject.arm("dense-fp8-torchao", lambda: _torchao(subject), limit=LIMIT)


def float8_layer(plain: Spec, factors: dict[str, Tensor], bias: Tensor | None = None) -> Any:
    """A layer with canonical `factors` rounded to float8, a scale a row."""
    spec, tensors = _stored(plain, factors)
    with torch.device("meta"):
        made = layer_of(spec, bias is not None)
    made.load_state_dict(tensors if bias is None else tensors | {"bias": bias}, assign=True)
    return made.requires_grad_(False).eval()


def _torchao(subject: Subject) -> tuple[Call, Rotation]:
    """What its users have: activations rounded a row at a time at every call, compiled."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    with torch.device("meta"):
        layer = nn.Linear(subject.fields["in_features"], subject.fields["out_features"], bias=False)
    layer.weight = nn.Parameter(subject.factors()[0], requires_grad=False)
    quantize_(layer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    compiled = torch.compile(layer, dynamic=False)
    return lambda x: compiled(x), subject.rotate(())


def rounding_call(subject: Subject, spec: Spec | None) -> tuple[Call, Rotation]:
    """A layer with float8 weights, dense if `spec` is None, on inputs that it rounds."""
    plain, factors = _factors(subject, spec)
    layer = float8_layer(plain, factors)
    structure = structure_of(layer)
    scales, weights = prepared(layer, structure, subject.x())

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return fp8_product(structure, fp8_rows(x), weights, scales, x.dtype)

    return call, subject.rotate(weights)


def dequantizing_call(subject: Subject, spec: Spec | None) -> tuple[Call, Rotation]:
    """The same on inputs as they are, its weights dequantized at every call."""
    plain, factors = _factors(subject, spec)
    packing, stored = _stored(plain, factors)
    product = reference_of("dense") if spec is None else our_call(spec.structure)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        held = dict(zip(stored, weights, strict=True))
        return product(x, *(unpack_factor(packing, name, held, x.dtype) for name in factors))

    return call, subject.rotate(list(stored.values()))


def _factors(subject: Subject, spec: Spec | None) -> tuple[Spec, dict[str, Tensor]]:
    plain = spec or DenseSpec(subject.fields["in_features"], subject.fields["out_features"])
    return plain, dict(zip(plain.shapes(), subject.factors(), strict=True))


def _stored(plain: Spec, factors: dict[str, Tensor]) -> tuple[QuantizedSpec, dict[str, Tensor]]:
    spec = QuantizedSpec(plain, 8, ROW, fp8=True)
    packed = (pack_factor(spec, name, factor, factor.dtype) for name, factor in factors.items())
    return spec, {name: tensor for found in packed for name, tensor in found.items()}
