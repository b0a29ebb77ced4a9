"""Weight-only int8 and int4 in plain torch: packing, unpacking, and the stage that uses them.

Symmetric, in groups of 128 along the contracted axis K, one scale a group. A row is padded to a
multiple of 128 with zeros. The bytes of a group are little-endian words of 32 bits: W = 16 words of
eight fields for int4, 32 of four for int8. Field f (bits 4 f or 8 f on) of word j holds element
f·W + j: int4 as level + 8, int8 as a signed byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.gemv.reference import gemv

GROUP = 128
BITS = (4, 8)
# Scales tried for an int4 group, as fractions of the one that maps its largest magnitude to -8.
# 8/7 maps it to 7 as well as -7; below 1 the largest are clipped and the rest is finer.
RATIOS = (8 / 7, 1.07, 1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.75, 0.7)
CHUNK = 1 << 24  # weights searched at once: bounds the memory of a quantization


def packed_width(K: int, bits: int) -> int:
    """Bytes of a packed row of K elements."""
    return -(-K // GROUP) * GROUP * bits // 8


def quantize(w: Tensor, bits: int, scale_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Pack weights.

    int8 takes ``absmax / 127`` as scale of a group; int4 the one of `RATIOS` (signed, so that the
    largest magnitude may use level −8) with the least squared error after the scale is rounded.

    Args:
        w: [..., R, K], any float dtype. bits: 4 or 8. scale_dtype: default that of `w`.

    Returns:
        packed: int8 [..., R, K'] or uint8 [..., R, K'/2], K' = K rounded up to 128.
        scale: [..., R, K'/128] in `scale_dtype`.

    Raises:
        ValueError: other bits.
    """
    _check(bits)
    groups = -(-w.shape[-1] // GROUP)
    padded = torch.nn.functional.pad(w, (0, groups * GROUP - w.shape[-1]))
    flat = padded.reshape(-1, GROUP)
    parts = [_quantize_groups(part, bits, scale_dtype or w.dtype) for part in flat.split(CHUNK // GROUP)]
    packed = torch.cat([part[0] for part in parts]) if parts else flat.to(torch.int8)
    scale = torch.cat([part[1] for part in parts]) if parts else flat[:, 0].to(scale_dtype or w.dtype)
    rows = w.shape[:-1]
    return packed.reshape(*rows, packed_width(w.shape[-1], bits)), scale.reshape(*rows, groups)


def dequantize(packed: Tensor, scale: Tensor, bits: int, K: int, dtype: torch.dtype) -> Tensor:
    """Weights [..., R, K] in `dtype`: levels times scales in float32 (or float64), rounded once."""
    _check(bits)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    levels = unpack(packed, bits).unflatten(-1, (-1, GROUP)).to(work)
    return (levels * scale.to(work).unsqueeze(-1)).flatten(-2)[..., :K].to(dtype)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Integer levels int8 [..., R, K'] of packed rows, padding included."""
    columns = packed.unflatten(-1, (-1, 4 * bits, 4)).transpose(-1, -2)  # [..., groups, byte, word]
    if bits == 4:
        columns = torch.stack((columns & 15, columns >> 4), -2).to(torch.int8) - 8
    return columns.flatten(-4 if bits == 4 else -3)


def pack(levels: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack`."""
    fields = levels.unflatten(-1, (-1, 32 // bits, 4 * bits))
    if bits == 4:
        low, high = (fields + 8).to(torch.uint8).unflatten(-2, (4, 2)).unbind(-2)
        fields = low | high << 4
    return fields.transpose(-1, -2).flatten(-3)


def gemv_quantized(
    x: Tensor, packed: Tensor, scale: Tensor, bits: int, K: int, **epilogue: Any
) -> Tensor:
    """`blr.kernels.gemv.reference.gemv` with weights dequantized to the dtype of `x`.

    Args:
        x: [n, …]. packed [B, R, bytes] and scale [B, R, groups]: of weights [B, R, K].
        epilogue: bias, gain, eps, part, residual, activation, as there.
    """
    return gemv(x, dequantize(packed, scale, bits, K, x.dtype), **epilogue)


def _quantize_groups(w: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Packed bytes and scales [G] of groups `w` [G, 128]."""
    work = w.to(torch.float64 if w.dtype == torch.float64 else torch.float32)
    largest = work.gather(-1, work.abs().argmax(-1, keepdim=True))  # signed [G, 1]
    if bits == 8:
        scale = (largest.abs() / 127).to(scale_dtype)
        return pack(_levels(work, scale, bits), bits), scale.squeeze(-1)
    best = torch.full_like(largest, torch.inf)
    scale = torch.zeros_like(largest, dtype=scale_dtype)
    for ratio in RATIOS:
        tried = (largest * (-ratio / 8)).to(scale_dtype)
        error = (_levels(work, tried, bits) * tried.to(work.dtype) - work).square().sum(-1, keepdim=True)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    return pack(_levels(work, scale, bits), bits), scale.squeeze(-1)


def _levels(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest levels, int8; zeros where the scale is zero."""
    top = 2 ** (bits - 1)
    levels = torch.where(scale == 0, 0.0, w / scale.to(w.dtype)).round()
    return levels.clamp(-top + (bits == 8), top - 1).to(torch.int8)


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"{bits} bits: expected 4 or 8")
