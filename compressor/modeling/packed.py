"""Packed factors as the decoding kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.modeling.modeling_blr import (
    E4M3,
    Factor,
    StructuredLinear,
    dequantize,
    dequantize_float8,
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

        return run(self.packed, self.scale, self.bits, self.K, self.scale.dtype, self.group)

    def runs_kernels(self) -> bool:
        """Whether kernels take it here; plain torch does what is traced, and trains scales."""
        watched = self.scale.requires_grad and torch.is_grad_enabled()
        if watched or is_traced() or not self.packed.is_cuda:
            return False
        return torch.compiler.is_compiling() or kernel_device(self.packed)

    def blocks(self) -> Packed:
        """The same with an axis of blocks."""
        return self._replace(packed=blocked(self.packed), scale=blocked(self.scale))


def packed_factor(layer: StructuredLinear, name: str) -> Packed:
    """The packed factor `name` of a layer ("U", "factors.0", "weight")."""
    factor: Factor = layer.held[name]
    packed, scale = layer.stored(factor)
    return Packed(packed, scale, factor.bits, factor.stored_shape[-1], factor.group)


def narrow_factor(layer: StructuredLinear, name: str) -> Narrow:
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
