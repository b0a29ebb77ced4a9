"""Products of layers with packed factors: on a GPU, and of one token on a CPU. On a GPU weights are
never plain. A CPU holds them a second time from the first such product on, as
`kernels/layers/packed/cpu.py` says."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr.compressor.modeling.modeling_blr import Factor, FormulaLinear, unpack
from blr.compressor.modeling.stages import packed_factor
from blr.kernels.layers.packed.cpu import (
    AT_ONCE,
    ROWS,
    SMALL,
    CpuWeight,
    cpu_weight,
    multiply,
    takes_format,
    takes_input,
)
from blr.kernels.layers.packed.op import packed_linear

if TYPE_CHECKING:
    from blr.compressor.modeling.layers import KernelLinear

LEAST = 32  # the operator's smallest group


def packed_product(
    layer: FormulaLinear, names: Sequence[str], x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """``x Wᵀ + bias`` [..., o] of x [..., i], in the dtype of x, by one packed factor after the other.
    names: of the factors, in the order in which x meets them. bias: [o] or None. Returns None where
    kernels do not take the factors: on a CPU, of blocks, in float8 or in another dtype than x."""
    if layer.entry.get("fp8") or any(layer.held[name].tile for name in names):
        return None
    factors = [packed_factor(layer, name) for name in names]
    if not all(w.takes(x) for w in factors):
        return None
    for w in factors:
        added = bias if w is factors[-1] else None
        x = packed_linear(x, w.packed, w.scale, added, w.bits, w.group, w.curved)
    return x


def cpu_product(
    layer: KernelLinear, names: Sequence[str], x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """``x Wᵀ + bias`` by the operator of a CPU, where W is the product of the layer's factors `names`,
    in the order in which x meets them; None where the operator does not take x or the factors."""
    if not takes_input(x, layer.out_features) or (weights := _held(layer, names, x.dtype)) is None:
        return None
    y = x[:, 0]
    for weight in weights:
        y = multiply(y, weight)
    y = y[:, None].to(x.dtype)
    return y if bias is None else y + bias


def _held(
    layer: KernelLinear, names: Sequence[str], dtype: torch.dtype
) -> list[CpuWeight | Tensor] | None:
    """The factors as the operator reads them, or plain; made again where what is stored has changed."""
    stored = [layer._buffers.get(f"{name}{end}") for name in names for end in ("_q", "_scale")]
    versions = [dtype, *(t is not None and not t.is_inference() and t._version for t in stored)]
    known = layer.cpu_weights
    same = known is not None and known[0] == versions and all(map(is_, known[1], stored))
    if not same:
        factors = [layer.held[name] for name in names]
        taken = all(map(_fits, factors))
        made = [_weight(layer, factor, dtype) for factor in factors] if taken else None
        layer.cpu_weights = versions, stored, made
    found: list[CpuWeight | Tensor] | None = layer.cpu_weights[2]
    return found


def _fits(factor: Factor) -> bool:
    matrix = len(factor.stored_shape) == 2
    return matrix and factor.storage == "integer" and takes_format(factor.bits, factor.curved)


def _weight(layer: FormulaLinear, factor: Factor, dtype: torch.dtype) -> CpuWeight | Tensor:
    if dtype == torch.float32 and prod(factor.shape) <= SMALL:
        plain = layer.factor(factor.name).to(dtype)
        return (plain.mT if factor.name == "V" else plain).contiguous()
    packed, scale = layer.stored(factor)
    if factor.tile is None:
        step = max(AT_ONCE // (ROWS * max(factor.stored_shape[-1], 1)), 1) * ROWS
        parts = (unpack(part, factor.bits, factor.group) for part in packed.split(step))
        return cpu_weight(parts, scale, factor.bits, factor.group)
    (rows, width), R = factor.tile, factor.matrix_shape[-2]
    levels = unpack(packed, factor.bits, factor.group).reshape(-1, width)[:R]
    group = max(width, LEAST)
    wide = pad(levels, (0, group - width))
    return cpu_weight([wide], scale.repeat_interleave(rows, 0)[:R], factor.bits, group)
