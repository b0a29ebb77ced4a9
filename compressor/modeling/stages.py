"""Describes structured layers for the decoding kernels: packed factors, and the stages of each
structure. Layers with kernels and those of `modeling_blr.py` alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blr.compressor.modeling.modeling_blr import (
    E4M3,
    Factor,
    FormulaLinear,
    SummedLinear,
    dequantize,
    dequantize_float8,
    stored_axes,
    unpack,
)
from blr.kernels.common.available import kernel_device
from blr.kernels.common.watching import is_traced
from blr.kernels.decode.gemv.segments import Narrow
from blr.kernels.decode.quantized.formats import GROUP


class Packed(NamedTuple):
    """A packed factor: `packed` [..., R, bytes], `scale` [..., R, groups] of weights [..., R, K]."""

    packed: Tensor
    scale: Tensor
    bits: int
    K: int
    group: int = GROUP
    curved: bool = True

    @property
    def fp8(self) -> bool:
        return self.packed.dtype == E4M3

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.K)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The same shape, under its name in a `Factor`."""
        return self.shape

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        if self.fp8:
            return dequantize_float8(self, self.packed, self.scale)
        if not self.runs_kernels() or torch.compiler.is_compiling():
            return dequantize(self, self.packed, self.scale)
        from blr.kernels.layers.packed.triton import dequantize as run

        form = self.bits, self.K, self.scale.dtype, self.group, self.curved
        return run(self.packed, self.scale, *form)

    def takes(self, x: Tensor) -> bool:
        """Whether kernels multiply x [..., K] with it as it is packed."""
        return self.packed.dim() == 2 and x.dtype == self.scale.dtype and self.runs_kernels()

    def runs_kernels(self) -> bool:
        """Whether kernels compute with it here; torch does in traces and where scales are trained."""
        watched = self.scale.requires_grad and torch.is_grad_enabled()
        if watched or is_traced() or not self.packed.is_cuda:
            return False
        return torch.compiler.is_compiling() or kernel_device(self.packed)

    def blocks(self) -> Packed:
        """The same factor with an axis of blocks."""
        return self._replace(packed=blocked(self.packed), scale=blocked(self.scale))


def packed_factor(layer: FormulaLinear, name: str) -> Packed:
    factor: Factor = layer.held[name]
    packed, scale = layer.stored(factor)
    return Packed(packed, scale, factor.bits, factor.stored_shape[-1], factor.group, factor.curved)


def narrow_factor(layer: FormulaLinear, name: str) -> Narrow:
    """A packed factor with a byte a number; dequantized where scales do not divide its rows."""
    found, factor = packed_factor(layer, name), layer.held[name]
    whole = found.bits >= 4
    levels = unpack(found.packed, found.bits, found.group) if whole else found.dequantized()
    levels, scale = levels[..., : found.K], found.scale
    if factor.tile:
        R, K = factor.matrix_shape[-2:]
        levels = levels.unflatten(-1, factor.tile).flatten(-3, -2)[..., :R, :K]
        scale = scale.repeat_interleave(factor.tile[0], -2)[..., :R, :]
    made = blocked(levels).contiguous()
    return Narrow(made, blocked(scale).contiguous(), found.group) if whole else Narrow(made)


def blocked(tensor: Tensor) -> Tensor:
    """Put an axis of one block before a matrix [R, K]; [B, R, K] stays as it is."""
    return tensor if tensor.dim() == 3 else tensor[None]


class LayerStage(NamedTuple):
    """One blockwise product, as `blr.kernels.decode.gemv.segments.Segment` takes it. w: [B, R, K], a
    view of the layer's own factor, or a `Packed` of that shape. bias: [B·R]. mix, part: as of `Segment`.
    correction: what is added to the product of a packed w."""

    w: Tensor | Packed
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None
    correction: Corrections | None = None

    @property
    def rows(self) -> int:
        return self.w.shape[0] * self.w.shape[1]

    @property
    def bytes(self) -> int:
        more = 0 if self.correction is None else self.correction.first.bytes + self.correction.u.nbytes
        return more + sum(t.nbytes for t in (self.w, self.bias, self.mix) if t is not None)


class Corrections(NamedTuple):
    """``U z`` of a structure beside packed weights: `first` computes z [B·r], `u` holds U [B, q, r]."""

    first: LayerStage
    u: Narrow


Stages = tuple[LayerStage, ...]


def _two(layer: FormulaLinear, **first: Any) -> Stages:
    return LayerStage(matrix(layer, "V"), **first), LayerStage(matrix(layer, "U"), layer.bias)


def _low_rank(layer: FormulaLinear) -> Stages:
    if layer.entry.get("side") == "in" and not layer.entry.get("bits"):
        U = layer.factor("U")  # outputs sum over the groups: one product, a copy
        return LayerStage(matrix(layer, "V")), LayerStage(U.movedim(0, 1).flatten(1)[None], layer.bias)
    return _two(layer)


# Structure -> its products in order; Kronecker-sparse layers decode through their own operator
STAGES: dict[str, Callable[[FormulaLinear], Stages]] = {
    "svd": _low_rank,
    "monarch": lambda layer: _two(layer, part=layer.entry["block_rank"]),
    "blast": lambda layer: _two(layer, mix=layer.factor("S")),
    "dense": lambda layer: (LayerStage(matrix(layer, "weight"), layer.bias),),
}
ADDED = ("svd", "monarch", "blast")  # corrections of packed weights: of others half is the first stage's


def stages_of(module: nn.Module) -> Stages | None:
    """The products by which decoding kernels compute a layer; None if only its own forward does."""
    if isinstance(module, SummedLinear):
        stages, correction = stages_of(module.base), correction_of(module.correction)
        if stages is None or correction is None:
            return None
        return (stages[0]._replace(bias=module.bias, correction=correction),)
    if isinstance(module, FormulaLinear):
        kept = module.entry.get("tiled") or module.entry.get("fp8")
        found = None if kept else STAGES.get(module.entry["structure"])
        return None if found is None else found(module)
    return (LayerStage(module.weight[None], module.bias),) if type(module) is nn.Linear else None


def correction_of(layer: FormulaLinear) -> Corrections | None:
    """The correction that decoding kernels add to a stage with the same input; None if they cannot."""
    if layer.entry.get("fp8") or layer.entry["structure"] not in ADDED:
        return None
    first, last = STAGES[layer.entry["structure"]](layer)
    if isinstance(last.w, Packed):
        return Corrections(first, narrow_factor(layer, "U"))
    return Corrections(first, Narrow(last.w.contiguous()))


def kind_of(w: object) -> tuple[int, int, bool]:
    """Bits, group and whether the grid is curved of packed weights; zeros for others."""
    return (w.bits, w.group, w.curved) if isinstance(w, Packed) else (0, 0, False)


def matrix(layer: FormulaLinear, name: str) -> Tensor | Packed:
    """A factor [B, R, K] for a stage: a view of what the layer stores."""
    factor = layer.held[name]
    if factor.bits:
        return packed_factor(layer, name).blocks()
    (stored,) = layer.stored(factor)
    order = () if factor.axes else sum(stored_axes(name, stored.dim(), False, "out"), ())
    return blocked(stored.permute(order) if order else stored)
