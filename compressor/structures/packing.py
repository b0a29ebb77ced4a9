"""Packs factors in few bits or float8 as the matrices that a layer stores; unpacks and restores them."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.spec import Shape
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec, Spec, stored_names
from blr.kernels.common.layout import canonical_view, to_physical
from blr.kernels.common.orders import Order
from blr.kernels.decode.quantized.reference import dequantize, quantize
from blr.kernels.fp8.reference import dequantize_fp8, quantize_fp8

Value = TypeVar("Value")


def to_matrix(spec: QuantizedSpec, name: str, factor: Tensor) -> Tensor:
    """The matrix [..., R, K] as which a canonical factor is packed, or its tiles, filled with zeros; a
    stack of factors [n, ...] gives one of matrices."""
    stack, order = _stack(factor, spec.shapes()[name]), sum(spec.axes(name), ())
    matrix = to_physical(factor, _behind(stack, order)).reshape(*stack, *spec.matrix_shape(name))
    tile = spec.tile(name)
    if tile is None:
        return matrix
    (rows, width), (R, K) = tile, matrix.shape[-2:]
    filled = torch.nn.functional.pad(matrix, (0, width - K, 0, -R % rows))
    return filled.reshape(*stack, *spec.packed_shape(name))


def from_matrix(spec: QuantizedSpec, name: str, matrix: Tensor) -> Tensor:
    """The canonical factor of such a matrix, a view: the inverse of `to_matrix`."""
    if tile := spec.tile(name):
        R, K = spec.matrix_shape(name)[-2:]
        matrix = matrix.unflatten(-1, tile).flatten(-3, -2)[..., :R, :K]
    return from_rows(spec, name, matrix)


def from_rows(spec: QuantizedSpec, name: str, matrix: Tensor) -> Tensor:
    """The canonical factor of a matrix [..., R, K] without tiles, a view; of a stack, a stack."""
    stack, order = _stack(matrix, spec.matrix_shape(name)), sum(spec.axes(name), ())
    shape = spec.shapes()[name]
    return canonical_view(
        matrix.reshape(*stack, *(shape[axis] for axis in order)), _behind(stack, order)
    )


def _stack(tensor: Tensor, shape: Shape) -> Shape:
    """The axes of a stack: those before the `shape` of one layer's tensor."""
    return tuple(tensor.shape[: tensor.dim() - len(shape)])


def _behind(stack: Shape, order: Order) -> Order:
    """An order of a tensor's axes behind those of a stack, which stay."""
    return (*range(len(stack)), *(len(stack) + axis for axis in order))


def pack_factor(
    spec: QuantizedSpec,
    name: str,
    factor: Tensor,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> dict[str, Tensor]:
    """Round a canonical factor to the nearest levels; returns the stored tensors by name. importance:
    what errors cost, of a shape that broadcasts to the matrix that is packed; float8 does not weigh."""
    form = spec.format_of(name)
    if form is None:
        return {name: factor.to(scale_dtype).contiguous()}
    matrix = to_matrix(spec, name, factor)
    if spec.fp8:
        return dict(zip(stored_names(name), quantize_fp8(matrix, form[1], scale_dtype), strict=True))
    if importance is None and spec.tile(name):  # what tiles are filled with costs nothing
        importance = to_matrix(spec, name, torch.ones_like(factor, dtype=torch.float32))
    grid = spec.curved, spec.superblocks
    packed, scale = quantize(matrix, form[0], scale_dtype, form[1], importance, *grid)
    return dict(zip(stored_names(name), (packed, scale), strict=True))


def unpack_factor(
    spec: QuantizedSpec, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """The canonical factor in `dtype` that stored tensors stand for."""
    form = spec.format_of(name)
    if form is None:
        return tensors[name].to(dtype)
    packed, scale = (tensors[stored] for stored in stored_names(name))
    if spec.fp8:
        return from_matrix(spec, name, dequantize_fp8(packed, scale, dtype, form[1]))
    width = spec.packed_shape(name)[-1]
    matrix = dequantize(packed, scale, form[0], width, dtype, form[1], spec.curved)
    return from_matrix(spec, name, matrix)


def factors_of(spec: Spec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The canonical factors of a plain or packed layer in `dtype`, by name."""
    if (packing := spec.packing) is not None:
        return {n: unpack_factor(packing, n, tensors, dtype) for n in spec.shapes()}
    return {name: tensors[name].to(dtype) for name in spec.shapes()}


def restored(spec: Spec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The dense weight [o, i] of stored `tensors`, named as ``spec.stored()``; computed in `dtype`."""
    if len(spec.parts()) > 1:
        parts = ((part, part_of(tensors, name)) for name, part in spec.parts())
        base, correction = (restored(part, held, dtype) for part, held in parts)
        return base + correction
    factors, plain = factors_of(spec, tensors, dtype), spec.plain
    if plain.structure == DenseSpec.structure:
        return factors["weight"]
    return STRUCTURES[plain.structure].factorizer().reconstruct(factors, plain)


def part_of(tensors: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Those whose names begin with the `name` of a part and a dot, by their names in it."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): tensor for k, tensor in tensors.items() if k.startswith(prefix)}
