"""Layers with weights of 8 to 2 bits, or in float8: structured and dense. Shipped in every checkpoint.

A factor is stored in kernel layout and packed along its contracted axis: ``<factor>_q`` and
``<factor>_scale``, buffers (`blr.kernels.decode.quantized.reference`), as its spec says. The canonical
names (``U``, ``V``, ``factors``, ``weight``) are dequantized when they are read, in the dtype of the
scales, so that every forward pass is that of the plain layer; the decoding runtime reads `packed`
instead, where it has kernels for the format. The S of BLAST, which is small, stays a parameter unless
its spec says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from blr.compressor.modeling.float8 import float8_product, forget_scales, prepare_layer
from blr.compressor.modeling.layers import (
    BlastLinear,
    KroneckerLinear,
    LowRankLinear,
    MonarchLinear,
    PivotedLinear,
    StructuredLinear,
)
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.modeling.stages import Corrections, Stage
from blr.compressor.structures.packing import from_matrix
from blr.compressor.structures.specs import (
    PACKED,
    SCALE,
    BlastSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    PivotedSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.decode.quantized.formats import GROUP, packed_width, scale_count
from blr.kernels.decode.quantized.reference import dequantize, unpack
from blr.kernels.decode.quantized.segments import Narrow
from blr.kernels.fp8.reference import E4M3, dequantize_fp8

DENSE = DenseSpec.structure  # the structure of an entry for a quantized nn.Linear
WHOLE = 1 << 27  # weights dequantized at once: an output head of 128256 x 4096 takes four turns
EXPORT_BITS = (4, 8)  # what `blr export` rounds plain weights to, in groups of `GROUP`


class Packed(NamedTuple):
    """A packed factor: `packed` [..., R, bytes], `scale` [..., R, groups] of weights [..., R, K]."""

    packed: Tensor
    scale: Tensor
    bits: int
    K: int
    group: int = GROUP

    @property
    def fp8(self) -> bool:
        """Whether `packed` are numbers in float8."""
        return self.packed.dtype == E4M3

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
        if self.fp8:
            return dequantize_fp8(self.packed, self.scale, self.scale.dtype, self.group)
        return dequantize(self.packed, self.scale, self.bits, self.K, self.scale.dtype, self.group)

    @property
    def has_kernels(self) -> bool:
        """Whether the decoding kernels read this format."""
        return not self.fp8


class QuantizedStructured(StructuredLinear):
    """What the quantized structured layers share.

    Args:
        spec: what is packed and how; the layer's `spec` is that of the structure. bias: as ever.
    """

    def __init__(self, spec: QuantizedSpec, bias: bool) -> None:
        self.packing = spec  # first: `_allocate` asks for it
        super().__init__(spec.of, bias)

    @property
    def bits(self) -> int:
        return self.packing.bits

    @property
    def described(self) -> Spec:
        return self.packing

    def _allocate(self) -> None:
        for name, shape in self.spec.shapes().items():
            form = self.packing.format_of(name)
            if form is None:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
                continue
            stem, _, index = name.partition(".")
            tensors = _empty(self.packing.packed_shape(name), *form, self.packing.fp8)
            for suffix, tensor in zip((PACKED, SCALE), tensors, strict=True):
                _register(self, stem + suffix, index, tensor)
        self._allocate_indices()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = float8_product(self, x, bias) if self.packing.fp8 else None
        return super().product(x, bias) if y is None else y

    def matrix(self, name: str) -> Any:
        return _blocks(self.packed(name))

    def stages(self) -> tuple[Stage, ...] | None:
        """As of the plain layer; None for a format that the decoding kernels do not read."""
        return None if self.packing.tiled or self.packing.fp8 else super().stages()

    def correction(self) -> Corrections | None:
        stages = None if self.packing.fp8 else super().stages()
        if stages is None or len(stages) != 2:
            return None
        return Corrections(stages[0], self.narrow("U"))

    def narrow(self, name: str) -> Narrow:
        """A packed factor as bytes, or, where levels are no whole multiples of scales, dequantized."""
        found, whole = self.packed(name), self.packed(name).bits >= 4
        levels = unpack(found.packed, found.bits, found.group) if whole else found.dequantized()
        levels, scale = levels[..., : found.K], found.scale
        if tile := self.packing.tile(name):
            R, K = self.packing.matrix_shape(name)[-2:]
            levels = levels.unflatten(-1, tile).flatten(-3, -2)[..., :R, :K]
            scale = scale.repeat_interleave(tile[0], -2)[..., :R, :]
        made = _blocked(levels).contiguous()
        return Narrow(made, _blocked(scale).contiguous(), found.group) if whole else Narrow(made)

    def packed(self, name: str) -> Packed:
        """The packed factor `name` ("U", "V", "factors.0"), of the spec's `packed_shape`."""
        stem, _, index = name.partition(".")
        parts = [getattr(self, stem + suffix) for suffix in (PACKED, SCALE)]
        packed, scale = (getattr(part, index) for part in parts) if index else parts
        form = self.packing.format_of(name)
        assert form is not None
        return Packed(packed, scale, form[0], self.packing.packed_shape(name)[-1], form[1])

    def dequantized(self, name: str) -> Tensor:
        """The canonical factor `name`, made anew at every call."""
        return from_matrix(self.packing, name, self.packed(name).dequantized())

    def relayout_(self) -> Self:
        """Nothing to do: what is stored is in kernel layout wherever the layer is."""
        return self

    def widen_(self) -> Self:
        """Nothing to do: packed rows start where their kernels ask for."""
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        with kept_bytes(self):
            super()._apply(fn, recurse)
        if self.packing.fp8:
            prepare_layer(self)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.packing.describe()}"


def _blocked(tensor: Tensor) -> Tensor:
    """[B, R, K] of [R, K]."""
    return tensor if tensor.dim() == 3 else tensor[None]


def _canonical(name: str) -> Any:
    return property(lambda layer: layer.dequantized(name), doc=f"{name}, dequantized when read.")


class QuantizedLowRankLinear(QuantizedStructured, LowRankLinear):
    """U_q [o, …], V_q [r, …] of i columns, or in groups [G, o/G, …] and [G, r, …]."""

    U, V = _canonical("U"), _canonical("V")


class QuantizedPivotedLinear(QuantizedStructured, PivotedLinear):
    """U_q [o - r, …], V_q [r, …] of i columns."""

    U, V = _canonical("U"), _canonical("V")


class QuantizedMonarchLinear(QuantizedStructured, MonarchLinear):
    """U_q [b, q, …], V_q [b, r, …] of p columns."""

    U, V = _canonical("U"), _canonical("V")


class QuantizedBlastLinear(QuantizedStructured, BlastLinear):
    """U_q [b, q, …], V_q [b, r, …] of p columns, S [b, b, r] or S_q [b, b, …] of r."""

    U, V = _canonical("U"), _canonical("V")


class QuantizedCoupledBlastLinear(QuantizedBlastLinear):
    """The same with couplings that are packed, too."""

    S = _canonical("S")


class QuantizedKroneckerLinear(QuantizedStructured, KroneckerLinear):
    """factors_q.n [a, d, …] of b·c columns."""

    def _made(self) -> list[Tensor]:
        return [self.dequantized(name) for name in self.spec.shapes()]

    factors: Any = property(_made, doc="The factors [a, b, c, d], dequantized when read.")

    def ordered(self) -> list[Tensor]:
        return self._made()


class QuantizedLinear(nn.Module):
    """A dense layer ``y = x Wᵀ + bias`` with weight_q [o, …] of i columns; replaces nn.Linear and,
    transposed, GPT-2's Conv1D."""

    def __init__(self, spec: QuantizedSpec, bias: bool) -> None:
        super().__init__()
        self.packing = self.described = spec
        self.in_features, self.out_features = spec.in_features, spec.out_features
        shape = (spec.out_features, spec.in_features)
        packed, scale = _empty(shape, spec.bits, spec.group, spec.fp8)
        self.register_buffer("weight" + PACKED, packed)
        self.register_buffer("weight" + SCALE, scale)
        self.bias = nn.Parameter(torch.zeros(spec.out_features)) if bias else None

    @property
    def entry(self) -> dict[str, Any]:
        """Of the table of layers in a file."""
        return self.described.to_dict()

    @property
    def bits(self) -> int:
        return self.packing.bits

    @property
    def weight(self) -> Tensor:
        """W [o, i], dequantized where something computes with it."""
        if torch.compiler.is_compiling():
            return self.composed()
        return DenseWeight(self, self.get_buffer("weight" + SCALE))

    def composed(self) -> Tensor:
        """W [o, i] in the dtype of the scales."""
        return self.packed().dequantized()

    def packed(self, name: str = "weight") -> Packed:
        """The packed weight [o, i]."""
        packed, scale = getattr(self, name + PACKED), getattr(self, name + SCALE)
        return Packed(packed, scale, self.bits, self.in_features, self.packing.group)

    def stages(self) -> tuple[Stage, ...] | None:
        """As of the structured layers; None for a format that the decoding kernels do not read."""
        found = _blocks(self.packed())
        return (Stage(found, self.bias),) if found.has_kernels else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o], with at most `WHOLE` weights dequantized at a time."""
        if self.packing.fp8 and (found := float8_product(self, x, self.bias)) is not None:
            return found
        w = self.packed()
        step = rows_at_once(w.K)
        if step >= self.out_features:
            return nn.functional.linear(x, w.dequantized(), self.bias)
        parts = zip(w.packed.split(step), w.scale.split(step), strict=True)
        made = (w._replace(packed=packed, scale=scale).dequantized() for packed, scale in parts)
        y = torch.cat([nn.functional.linear(x, weight) for weight in made], -1)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        with kept_bytes(self):
            super()._apply(fn, recurse)
        if self.packing.fp8:
            prepare_layer(self)
        return self

    def extra_repr(self) -> str:
        sizes = f"{self.in_features} -> {self.out_features}"
        return f"{DENSE} {sizes}, bias={self.bias is not None}, {self.packing.describe()}"


@contextmanager
def kept_bytes(layer: nn.Module) -> Iterator[None]:
    """Inside, buffers of float8 are bytes, also those of numbered factors: moved like all others, and
    cast to no other dtype."""
    held = [(m, name) for m in layer.modules() for name, b in m._buffers.items() if _is_float8(b)]
    for module, name in held:
        module._buffers[name] = module.get_buffer(name).view(torch.uint8)
    try:
        yield
    finally:
        for module, name in held:
            module._buffers[name] = module.get_buffer(name).view(E4M3)
        forget_scales(layer)


def _is_float8(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.dtype == E4M3


def rows_at_once(width: int) -> int:
    """Rows of `width` weights that are worked on together."""
    return max(WHOLE // max(width, 1), 1)


QUANTIZED_LAYERS: dict[type[Spec], type[QuantizedStructured]] = {
    LowRankSpec: QuantizedLowRankLinear,
    PivotedSpec: QuantizedPivotedLinear,
    MonarchSpec: QuantizedMonarchLinear,
    BlastSpec: QuantizedBlastLinear,
    KroneckerSpec: QuantizedKroneckerLinear,
}


def quantized_layer(spec: QuantizedSpec, bias: bool) -> QuantizedStructured | QuantizedLinear:
    """An empty layer that holds what `spec` says."""
    if isinstance(spec.of, DenseSpec):
        return QuantizedLinear(spec, bias)
    if isinstance(spec.of, BlastSpec) and spec.kept_bits:
        return QuantizedCoupledBlastLinear(spec, bias)
    return QUANTIZED_LAYERS[type(spec.of)](spec, bias)


def _blocks(found: Packed) -> Packed:
    """The same with an axis of blocks."""
    return found._replace(packed=_blocked(found.packed), scale=_blocked(found.scale))


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


def _empty(shape: tuple[int, ...], bits: int, group: int, fp8: bool) -> tuple[Tensor, Tensor]:
    """Packed weights and scales of a zero matrix [..., R, K], to be loaded."""
    *rows, K = shape
    dtype = E4M3 if fp8 else torch.int8 if bits == 8 else torch.uint8
    packed = torch.zeros(*rows, K if fp8 else packed_width(K, bits, group), dtype=dtype)
    return packed, torch.zeros(*rows, scale_count(K, group))
