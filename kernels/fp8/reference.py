"""Numbers in float8 e4m3 in plain torch: rounding, scales, and products as the kernels compute them.

Each number is the nearest of e4m3 to itself over its scale, and a scale takes the largest magnitude of
its row, or of its block of 128 along the axis that is summed over, to 448, the largest of e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.quantized.formats import ROW

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def quantize_fp8(
    w: Tensor, group: int = ROW, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3 and their scales.

    Args:
        w: [..., K], any float dtype. group: numbers along K that share a scale, `ROW` for all of them.
        scale_dtype: default that of `w`. Numbers are rounded for the scale as it is stored.

    Returns:
        float8_e4m3fn [..., K], and scales [..., 1] or [..., ⌈K/group⌉] in `scale_dtype`; of numbers that
        are all zero, or too small for that dtype, the scale and what is stored are zero.
    """
    K = w.shape[-1]
    width = group or K
    work = w.to(torch.float64 if w.dtype == torch.float64 else torch.float32)
    grouped = torch.nn.functional.pad(work, (0, -K % width)).unflatten(-1, (-1, width))
    scale = (grouped.abs().amax(-1) / LARGEST).to(scale_dtype or w.dtype)
    wide = scale.to(work.dtype).unsqueeze(-1)
    unit = torch.where(wide == 0, 0.0, grouped / wide)
    # beyond 448 by what the scale was rounded: e4m3 has no infinity to say so
    return unit.clamp(-LARGEST, LARGEST).flatten(-2)[..., :K].to(E4M3), scale


def dequantize_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype, group: int = ROW) -> Tensor:
    """Numbers [..., K] in `dtype`: those of `quantize_fp8` times their scales, rounded once."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    wide = scale.to(work)
    if group:
        wide = wide.repeat_interleave(group, -1)[..., : q.shape[-1]]
    return (q.to(work) * wide).to(dtype)


def is_number(tensor: Tensor) -> bool:
    """Whether `tensor` holds floating-point numbers that mean something by themselves: those of float8
    are nothing without their scales, and few of torch's functions take them."""
    return tensor.is_floating_point() and tensor.element_size() > 1
