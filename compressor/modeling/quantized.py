"""Layers with int8 or int4 weights: structured ones and dense ones. Shipped in quantized exports.

A factor is stored in kernel layout and packed along its contracted axis: ``<factor>_q`` and
``<factor>_scale``, buffers (`blr.kernels.quantized.reference`). The canonical names (``U``, ``V``,
``factors``, ``weight``) are dequantized when they are read, in the dtype of the scales, so that
every forward pass is that of the plain layer; the decoding runtime reads `packed` instead.
The S of BLAST, which is small, stays a parameter in full precision.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from blr.compressor.modeling.layers import (
    BlastLinear,
    KroneckerLinear,
    LowRankLinear,
    MonarchLinear,
    StructuredLinear,
    replace_modules,
)
from blr.compressor.modeling.stages import Stage
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    Spec,
    spec_from_dict,
)
from blr.kernels.common.layout import canonical_view, order_of, to_physical
from blr.kernels.quantized.reference import GROUP, dequantize, packed_width

PACKED, SCALE = "_q", "_scale"
DENSE = "dense"  # the structure of an entry for a quantized nn.Linear
WHOLE = 1 << 27  # weights dequantized at once: an output head of 128256 x 4096 takes four turns
Axes = tuple[tuple[int, ...], ...]


class Packed(NamedTuple):
    """A packed factor: `packed` [..., R, bytes], `scale` [..., R, groups] of weights [..., R, K]."""

    packed: Tensor
    scale: Tensor
    bits: int
    K: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights, [..., R, K]."""
        return (*self.packed.shape[:-1], self.K)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.packed.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """[..., R, K] in the dtype of the scales."""
        return dequantize(self.packed, self.scale, self.bits, self.K, self.scale.dtype)


def matrix_shape(spec: Spec, name: str) -> tuple[int, ...]:
    """Shape [..., R, K] that a factor is packed in: the factor in kernel layout, but with two axes
    made one where a product sums over both or one alone would leave most of a group empty:
    Kronecker-sparse [a, d, b·c], and the U of a low-rank layer in input groups [o, G·r]."""
    return tuple(map(prod, _sizes(spec, name)))


def to_matrix(spec: Spec, name: str, factor: Tensor) -> Tensor:
    """A canonical factor as it is packed, [..., R, K]."""
    return to_physical(factor, _order(spec, name)).reshape(matrix_shape(spec, name))


def _axes(spec: Spec, name: str) -> Axes:
    return QUANTIZED_LAYERS[type(spec)].axes(spec, name)


def _order(spec: Spec, name: str) -> tuple[int, ...]:
    return sum(_axes(spec, name), ())


def _sizes(spec: Spec, name: str) -> list[tuple[int, ...]]:
    """Sizes of the axes behind each axis of `matrix_shape`."""
    shape = spec.shapes()[name]
    return [tuple(shape[axis] for axis in joined) for joined in _axes(spec, name)]


def from_matrix(spec: Spec, name: str, matrix: Tensor) -> Tensor:
    """The inverse of `to_matrix`: a view in canonical shape."""
    sizes = [size for joined in _sizes(spec, name) for size in joined]
    return canonical_view(matrix.reshape(sizes), _order(spec, name))


def stored_names(name: str) -> tuple[str, str]:
    """``V`` -> ``V_q``, ``V_scale``; ``factors.0`` -> ``factors_q.0``, ``factors_scale.0``."""
    stem, dot, index = name.partition(".")
    return f"{stem}{PACKED}{dot}{index}", f"{stem}{SCALE}{dot}{index}"


def is_quantized(spec: Spec, name: str) -> bool:
    """Whether a quantized layer of `spec` packs this factor."""
    return name not in QUANTIZED_LAYERS[type(spec)].kept


class QuantizedStructured(StructuredLinear):
    """What the quantized structured layers share.

    Args:
        spec, bias: as of the plain layer. bits: 4 or 8.

    kept: factors that are never packed.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: Spec, bias: bool, bits: int) -> None:
        self.bits = bits  # first: `_allocate` asks for it
        super().__init__(spec, bias)

    def _allocate(self) -> None:
        for name, shape in self.spec.shapes().items():
            if is_quantized(self.spec, name):
                stem, _, index = name.partition(".")
                tensors = _empty(matrix_shape(self.spec, name), self.bits)
                for suffix, tensor in zip((PACKED, SCALE), tensors, strict=True):
                    _register(self, stem + suffix, index, tensor)
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    @classmethod
    def axes(cls, spec: Spec, name: str) -> Axes:
        """The canonical axes behind each axis of the matrix [..., R, K] that a factor is packed as."""
        return tuple((axis,) for axis in order_of(spec.structure, name, len(spec.shapes()[name])))

    def matrix(self, name: str) -> Any:
        return _blocks(self.packed(name))

    def packed(self, name: str) -> Packed:
        """The packed factor `name` ("U", "V", "factors.0"), of `matrix_shape`."""
        stem, _, index = name.partition(".")
        parts = [getattr(self, stem + suffix) for suffix in (PACKED, SCALE)]
        packed, scale = (getattr(part, index) for part in parts) if index else parts
        return Packed(packed, scale, self.bits, matrix_shape(self.spec, name)[-1])

    def dequantized(self, name: str) -> Tensor:
        """The canonical factor `name`, made anew at every call."""
        return from_matrix(self.spec, name, self.packed(name).dequantized())

    def relayout_(self) -> Self:
        """Nothing to do: what is stored is in kernel layout wherever the layer is."""
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int{self.bits}"


def _canonical(name: str) -> Any:
    return property(lambda layer: layer.dequantized(name), doc=f"{name}, dequantized when read.")


class QuantizedLowRankLinear(QuantizedStructured, LowRankLinear):
    """U_q [o, …], V_q [r, …] of i columns, or in groups [G, o/G, …] and [G, r, …]."""

    @classmethod
    def axes(cls, spec: Spec, name: str) -> Axes:
        if getattr(spec, "side", None) == "in" and name == "U":  # a product over all groups' ranks
            return (1,), (0, 2)
        return super().axes(spec, name)

    U, V = _canonical("U"), _canonical("V")


class QuantizedMonarchLinear(QuantizedStructured, MonarchLinear):
    """U_q [b, q, …], V_q [b, r, …] of p columns."""

    U, V = _canonical("U"), _canonical("V")


class QuantizedBlastLinear(QuantizedStructured, BlastLinear):
    """U_q [b, q, …], V_q [b, r, …] of p columns, S [b, b, r]."""

    kept = ("S",)

    U, V = _canonical("U"), _canonical("V")


class QuantizedKroneckerLinear(QuantizedStructured, KroneckerLinear):
    """factors_q.n [a, d, …] of b·c columns."""

    @classmethod
    def axes(cls, spec: Spec, name: str) -> Axes:
        (a,), (d,), (b,), (c,) = super().axes(spec, name)
        return (a,), (d,), (b, c)

    def _made(self) -> list[Tensor]:
        return [self.dequantized(name) for name in self.spec.shapes()]

    factors: Any = property(_made, doc="The factors [a, b, c, d], dequantized when read.")

    def ordered(self) -> list[Tensor]:
        return self._made()


class QuantizedLinear(nn.Module):
    """A dense layer ``y = x Wᵀ + bias`` with weight_q [o, …] of i columns; replaces nn.Linear and,
    transposed, GPT-2's Conv1D."""

    def __init__(self, in_features: int, out_features: int, bias: bool, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        packed, scale = _empty((out_features, in_features), bits)
        self.register_buffer("weight" + PACKED, packed)
        self.register_buffer("weight" + SCALE, scale)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    weight = property(lambda layer: layer.packed().dequantized(), doc="W [o, i], dequantized when read.")

    def packed(self, name: str = "weight") -> Packed:
        """The packed weight [o, i]."""
        packed, scale = getattr(self, name + PACKED), getattr(self, name + SCALE)
        return Packed(packed, scale, self.bits, self.in_features)

    def stages(self) -> tuple[Stage, ...]:
        """As of the structured layers."""
        return (Stage(_blocks(self.packed()), self.bias),)

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o], with at most `WHOLE` weights dequantized at a time."""
        w = self.packed()
        step = rows_at_once(w.K)
        if step >= self.out_features:
            return nn.functional.linear(x, w.dequantized(), self.bias)
        parts = zip(w.packed.split(step), w.scale.split(step), strict=True)
        made = (w._replace(packed=packed, scale=scale).dequantized() for packed, scale in parts)
        y = torch.cat([nn.functional.linear(x, weight) for weight in made], -1)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        sizes = f"{self.in_features} -> {self.out_features}"
        return f"{DENSE} {sizes}, bias={self.bias is not None}, int{self.bits}"


def rows_at_once(width: int) -> int:
    """Rows of `width` weights that are worked on together."""
    return max(WHOLE // max(width, 1), 1)


QUANTIZED_LAYERS: dict[type[Spec], type[QuantizedStructured]] = {
    LowRankSpec: QuantizedLowRankLinear,
    MonarchSpec: QuantizedMonarchLinear,
    BlastSpec: QuantizedBlastLinear,
    KroneckerSpec: QuantizedKroneckerLinear,
}


def quantized_linear(fields: dict[str, Any], bias: bool) -> QuantizedStructured | QuantizedLinear:
    """The module for a table entry: "bits" beside the fields of a spec, or beside "structure": "dense",
    "in_features" and "out_features"."""
    fields = dict(fields)
    bits = fields.pop("bits")
    if fields["structure"] == DENSE:
        return QuantizedLinear(fields["in_features"], fields["out_features"], bias, bits)
    spec = spec_from_dict(fields)
    return QUANTIZED_LAYERS[type(spec)](spec, bias, bits)


def dense_entry(rows: int, columns: int, bits: int) -> dict[str, Any]:
    """What `quantized_linear` makes a `QuantizedLinear` of weights [rows, columns] from."""
    return {"structure": DENSE, "in_features": columns, "out_features": rows, "bits": bits}


def replace_quantized(model: nn.Module, layers: dict[str, dict[str, Any]]) -> None:
    """Put an empty quantized layer in the place of every module that `layers` names, on its device,
    with scales and bias in its dtype.

    Args:
        layers: module name to an entry for `quantized_linear`.

    Raises:
        KeyError: a name that is not a module of `model`.
    """
    replace_modules(model, layers, quantized_linear)


def _blocks(found: Packed) -> Packed:
    """The same with an axis of blocks."""
    if found.packed.dim() == 3:
        return found
    return found._replace(packed=found.packed[None], scale=found.scale[None])


class _Buffers(nn.Module):
    """Numbered buffers, the counterpart of nn.ParameterList."""


def _register(layer: nn.Module, name: str, index: str, tensor: Tensor) -> None:
    """Register a buffer ``name`` or, in a list, ``name.index``."""
    if not index:
        layer.register_buffer(name, tensor)
        return
    if name not in layer._modules:
        layer.add_module(name, _Buffers())
    layer.get_submodule(name).register_buffer(index, tensor)


def _empty(shape: tuple[int, ...], bits: int) -> tuple[Tensor, Tensor]:
    """Packed weights and scales of a zero matrix [..., R, K], to be loaded."""
    packed = torch.zeros(*shape[:-1], packed_width(shape[-1], bits), dtype=_DTYPES[bits])
    return packed, torch.zeros(*shape[:-1], -(-shape[-1] // GROUP))


_DTYPES = {8: torch.int8, 4: torch.uint8}
