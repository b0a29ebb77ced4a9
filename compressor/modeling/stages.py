"""What the decoding kernels take of a structured layer: packed factors, and its stages, one entry a
structure.

Of layers with kernels and of those of `modeling_blr.py` alike.
"""

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
from blr.kernels.common.registration import is_traced
from blr.kernels.decode.quantized.formats import GROUP
from blr.kernels.decode.quantized.segments import Narrow

EXPORT_BITS = (4, 8)  # what `blr export` rounds plain weights to, in groups of `GROUP`


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
        """Whether `packed` are numbers in float8."""
        return self.packed.dtype == E4M3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights, [..., R, K]."""
        return (*self.packed.shape[:-1], self.K)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The same, as of a `Factor`."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.packed.nbytes + self.scale.nbytes

    def dequantized(self) -> Tensor:
        """[..., R, K] in the dtype of the scales."""
        if self.fp8:
            return dequantize_float8(self, self.packed, self.scale)
        if not self.runs_kernels() or torch.compiler.is_compiling():
            return dequantize(self, self.packed, self.scale)
        from blr.kernels.layers.packed.triton import dequantize as run

        form = self.bits, self.K, self.scale.dtype, self.group, self.curved
        return run(self.packed, self.scale, *form)

    def runs_kernels(self) -> bool:
        """Whether kernels take it here; plain torch does what is traced, and trains scales."""
        watched = self.scale.requires_grad and torch.is_grad_enabled()
        if watched or is_traced() or not self.packed.is_cuda:
            return False
        return torch.compiler.is_compiling() or kernel_device(self.packed)

    def blocks(self) -> Packed:
        """The same with an axis of blocks."""
        return self._replace(packed=blocked(self.packed), scale=blocked(self.scale))


def packed_factor(layer: FormulaLinear, name: str) -> Packed:
    """The packed factor `name` of a layer ("U", "factors.0", "weight")."""
    factor: Factor = layer.held[name]
    packed, scale = layer.stored(factor)
    return Packed(packed, scale, factor.bits, factor.stored_shape[-1], factor.group, factor.curved)


def narrow_factor(layer: FormulaLinear, name: str) -> Narrow:
    """A packed factor as bytes, or, where levels are no whole multiples of scales, dequantized."""
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
    """[B, R, K] of [R, K]."""
    return tensor if tensor.dim() == 3 else tensor[None]


class LayerStage(NamedTuple):
    """One blockwise product, as `blr.kernels.decode.gemv.segments.Segment` takes it.

    w: [B, R, K], a view of the layer's own factor, or a `packed.Packed` of that shape.
    bias: [B·R]. mix: [B, B, R]. part: see there. correction: of packed w, what else is added.
    places: [o], of a last stage whose outputs stand behind those of the stage before: output k is number
    ``places[k]`` of both, to which the bias [o] is then added.
    """

    w: Any
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None
    correction: Corrections | None = None
    places: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return self.w.shape[0] * self.w.shape[1]

    @property
    def bytes(self) -> int:
        """What one token has to read of it."""
        more = 0 if self.correction is None else self.correction.first.bytes + self.correction.u.nbytes
        return more + sum(t.nbytes for t in (self.w, self.bias, self.mix, self.places) if t is not None)


class Corrections(NamedTuple):
    """``U z`` of a structure beside packed weights: z [B·r] is what its first stage gives, u [B, q, r] a
    `blr.kernels.decode.quantized.segments.Narrow`."""

    first: LayerStage
    u: Any


Stages = tuple[LayerStage, ...]


def _low_rank(layer: FormulaLinear) -> Stages:
    if layer.entry.get("side") == "in" and not layer.entry.get("bits"):
        U = layer.factor("U")  # outputs sum over the groups: one product, a copy
        return LayerStage(matrix(layer, "V")), LayerStage(U.movedim(0, 1).flatten(1)[None], layer.bias)
    return LayerStage(matrix(layer, "V")), LayerStage(matrix(layer, "U"), layer.bias)


def _pivoted(layer: FormulaLinear) -> Stages:
    last = LayerStage(matrix(layer, "U"), layer.bias, places=layer.factor("places"))
    return LayerStage(matrix(layer, "V")), last


def _monarch(layer: FormulaLinear) -> Stages:
    first = LayerStage(matrix(layer, "V"), part=layer.entry["block_rank"])
    return first, LayerStage(matrix(layer, "U"), layer.bias)


def _blast(layer: FormulaLinear) -> Stages:
    first = LayerStage(matrix(layer, "V"), mix=layer.factor("S"))
    return first, LayerStage(matrix(layer, "U"), layer.bias)


def _dense(layer: FormulaLinear) -> Stages:
    return (LayerStage(matrix(layer, "weight"), layer.bias),)


# Structure -> its products in order; Kronecker-sparse layers decode through their own operator
STAGES: dict[str, Callable[[FormulaLinear], Stages]] = {
    **{"svd": _low_rank, "pivoted": _pivoted, "monarch": _monarch, "blast": _blast},
    "dense": _dense,
}
ADDED = ("svd", "monarch", "blast")  # corrections of packed weights: of others half is the first stage's


def stages_of(module: nn.Module) -> Stages | None:
    """The products that decoding kernels compute a dense or structured layer by, in order; None if only
    its own forward does."""
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
    """What decoding kernels add by a layer to a stage of the same input; None if only `forward` does."""
    if layer.entry.get("fp8") or layer.entry["structure"] not in ADDED:
        return None
    first, last = STAGES[layer.entry["structure"]](layer)
    packed = layer.entry.get("bits")
    return Corrections(first, narrow_factor(layer, "U") if packed else Narrow(last.w.contiguous()))


def kind_of(w: object) -> tuple[int, int, bool]:
    """Bits and group of packed weights and whether their grid is curved, zeros for others: stages of one
    `dual` have the same."""
    return (w.bits, w.group, w.curved) if isinstance(w, Packed) else (0, 0, False)


def matrix(layer: FormulaLinear, name: str) -> object:
    """A factor [B, R, K] as a stage takes it: in place."""
    factor = layer.held[name]
    if factor.bits:
        return packed_factor(layer, name).blocks()
    (stored,) = layer.stored(factor)
    order = () if factor.axes else sum(stored_axes(name, stored.dim(), False, "out"), ())
    return blocked(stored.permute(order) if order else stored)
