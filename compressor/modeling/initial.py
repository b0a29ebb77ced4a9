"""First values of structured layers, where a model is made, not loaded. Shipped in every checkpoint.

transformers gives the values of the layers that it knows, also to a model that was made on the meta
device and has whatever lay in memory since. What is packed is not trained: its first values are of the
right size, and the same at every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import initialization as init

from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.modeling.kernel_layout import SUFFIX
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.quantized import QuantizedLinear
from blr.compressor.modeling.random_init import spread
from blr.compressor.structures.specs import PACKED, SCALE
from blr.kernels.fp8.reference import E4M3

MIXER, SHIFT, BYTE = 2654435761, 16, 255  # of a multiplicative hash (Knuth)
SMALL = 191  # the bits of a byte but the one that makes a float8 2 or more, or no number
PART = 0.5  # of unit gain: a weight and its correction are summed, and neither is trained to less
FLOAT8 = 0.6  # root mean square of such numbers


@torch.no_grad()
def initialize_layers(model: Any) -> None:
    """Give the structured layers of `model` first values, but for layers and tensors that have theirs,
    of which transformers keeps a mark, and what lies on the meta device."""
    for layer in model.modules():
        if getattr(layer, "_is_hf_initialized", False):
            continue
        if isinstance(layer, CorrectedLinear) and layer.bias is not None:
            init.zeros_(layer.bias)
        elif isinstance(layer, StructuredLinear | QuantizedLinear):
            _initialize(layer)


def _initialize(layer: Any) -> None:
    """Factors of unit gain, no bias, indices in order."""
    shapes = getattr(layer, "spec", layer.described).shapes()
    for name, factor in layer.named_parameters():
        if name == "bias":
            init.zeros_(factor)
        else:
            canonical = name.replace(SUFFIX, "")
            init.normal_(factor, std=spread(canonical, shapes[canonical]))
    for name, buffer in layer.named_buffers():
        if buffer.is_meta or getattr(buffer, "_is_hf_initialized", False):
            continue
        stem = name.replace(PACKED, "").replace(SCALE, "")
        unit = spread(stem, shapes[stem]) if stem in shapes else layer.in_features**-0.5
        init.copy_(buffer, _first(buffer, layer, unit))


def _first(buffer: Tensor, layer: Any, unit: float) -> Tensor:
    """First values of packed numbers, scales that give them `PART` of a standard deviation of `unit`, or
    indices, like `buffer`."""
    places = torch.arange(buffer.numel(), device=buffer.device)
    if buffer.dtype == torch.int32:
        return places
    if buffer.dtype not in (torch.uint8, torch.int8, E4M3):
        levels = FLOAT8 if layer.packing.fp8 else 2**layer.bits / 12**0.5
        return torch.full_like(buffer, PART * unit / levels)
    mixed = (places * MIXER >> SHIFT) & (SMALL if buffer.dtype == E4M3 else BYTE)
    return mixed.to(torch.uint8).view(buffer.dtype).view(buffer.shape)
