"""First values of packed numbers, where a model is made, not loaded.

They are not trained: of the right size, and the same at every time. What is trained has those of
`modeling_blr.first_values`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init

from blr.compressor.modeling.layers import KernelLinear
from blr.compressor.modeling.modeling_blr import Factor

MIXER, SHIFT, BYTE = 2654435761, 16, 255  # of a multiplicative hash (Knuth)
SMALL = 191  # the bits of a byte but the one that makes a float8 2 or more, or no number
PART = 0.5  # of unit gain: a weight and its correction are summed, and neither is trained to less
FLOAT8 = 0.6  # root mean square of such numbers


@torch.no_grad()
def initialize_packed(model: Any) -> None:
    """Give the packed factors of `model` first values, but for layers and tensors that have theirs, of
    which transformers keeps a mark, and what lies on the meta device."""
    for layer in model.modules():
        if not isinstance(layer, KernelLinear) or getattr(layer, "_is_hf_initialized", False):
            continue
        for factor in layer.held.values():
            if factor.bits:
                packed, scale = layer.stored(factor)
                _fill(packed, _mixed, factor)
                _fill(scale, _scale, factor)


def _fill(buffer: Tensor, values: Any, factor: Factor) -> None:
    if not buffer.is_meta and not getattr(buffer, "_is_hf_initialized", False):
        init.copy_(buffer, values(buffer, factor))


def _mixed(buffer: Tensor, factor: Factor) -> Tensor:
    places = torch.arange(buffer.numel(), device=buffer.device)
    mixed = (places * MIXER >> SHIFT) & (SMALL if factor.storage == "float8" else BYTE)
    return mixed.to(torch.uint8).view(buffer.dtype).view(buffer.shape)


def _scale(buffer: Tensor, factor: Factor) -> Tensor:
    """Scales that give the numbers `PART` of a standard deviation of unit gain."""
    levels = FLOAT8 if factor.storage == "float8" else 2**factor.bits / 12**0.5
    return torch.full_like(buffer, PART * factor.unit / levels)
