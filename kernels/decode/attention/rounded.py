"""Keys and values in int8, with a scale for every token and head."""

import torch
from torch import Tensor

LARGEST = 127.0  # magnitude in int8
TINY = 1e-30  # least scale, of a token whose numbers are all zero


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of x [..., D] and the scale [...] in float32 of every token and head: the nearest multiples
    of a 127th of the largest magnitude."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp_min(TINY)
    return (x / scale[..., None]).round().to(torch.int8), scale


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `pack` stood for, in `dtype`."""
    return (packed * scale[..., None]).to(dtype)
