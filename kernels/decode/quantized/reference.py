"""Weights of 8, 4, 3 and 2 bits in plain torch: packing, unpacking, and the stage that uses them.

Symmetric, in groups of `GROUP` (128 unless told, 64 or 32) along the contracted axis K, one scale a
group and no zero point. A level is an integer from −2^(bits−1) on; it stands for ``scale · level`` of 8
and 4 bits, and for ``scale · x`` with x = level + 1/2 of 2 bits, where a grid without zero loses less.
Three bits have two grids: curved, ``scale · x (1 + x² / 50)``, whose steps widen outwards, and uniform,
``scale · level``: its squared error of Gaussian weights is 9% more in groups of 128, 2% in groups of 32
(half-integers lose 10% and 13%). A row is padded to whole groups; of what is padded nothing is read.

The bytes of a group are little-endian words of 32 bits, W = group · bits / 32 of them, with 32 / bits
fields each. Field f (bits f · bits on) of word j holds element f·W + j: a level of 8 bits as a signed
byte, others with 2^(bits−1) added (so that x = q − OFFSET[bits] of a field q). Three bits are two
planes, first the low two bits of every level in words of 16 fields, then the high one in words of 32:
48 bytes of 128 levels.
"""

import torch
from torch import Tensor

from blr.kernels.decode.quantized.formats import (
    GROUP,
    MULTIPLES,
    PLANES,
    SUPERBLOCK,
    check_format,
    grid_of,
    packed_width,
)

# Scales tried for a group, as fractions of the one that maps its largest magnitude to the lowest level
# (int4: −8; 8/7 maps it to 7 as well as −7). Below 1 the largest are clipped and the rest is finer:
# of Gaussian weights the best steps of 4 and 8 levels are 0.996 and 0.586 standard deviations.
RATIOS = {
    4: (8 / 7, 1.07, 1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.75, 0.7),
    3: tuple(0.94**n for n in range(13)),
    2: tuple(0.91**n for n in range(16)),
}
UNIFORM = tuple(0.94**n for n in range(-3, 12))  # the same of the uniform grid of three bits
REFINED = {4: 0, 3: 2, 2: 2}  # rounds of least squares for the scale, and the levels again
CHUNK = 1 << 24  # weights searched at once: bounds the memory of a quantization


def quantize(
    w: Tensor,
    bits: int,
    scale_dtype: torch.dtype | None = None,
    group: int = GROUP,
    importance: Tensor | None = None,
    curved: bool = True,
    superblocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pack weights, each rounded to the nearest level of its group's scale (`scales_of`).

    Args:
        w: [..., R, K], any float dtype. scale_dtype: default that of `w`.
        importance: [K] or of a shape that broadcasts to `w`, what an error costs: of a dense weight the
            diagonal of its inputs' Gram matrix.
        curved: which grid 3 bits take, here and below. superblocks: whether scales are those of
            `shared_scales`; rows are then of whole superblocks.

    Returns:
        packed: uint8 (int8 of 8 bits) [..., R, K'·bits/8], K' = K rounded up to whole groups.
        scale: [..., R, K'/group] in `scale_dtype`.

    Raises:
        ValueError: other bits or groups.
    """
    check_format(bits, group)
    K, rows, dtype = w.shape[-1], w.shape[:-1], scale_dtype or w.dtype
    count = -(-K // group)
    padded = torch.nn.functional.pad(w, (0, count * group - K)).reshape(-1, count, group)
    costs = _costs(w, bits, group, importance, curved)
    step = max(CHUNK // max(count * group, 1), 1)
    own = costs if costs is not None and costs.dim() > 2 else None
    parts = [
        _quantized(
            *(part, bits, dtype, costs if own is None else own[n * step : (n + 1) * step], curved),
            superblocks,
        )
        for n, part in enumerate(padded.split(step))
    ]
    packed, scale = (torch.cat([part[n] for part in parts]) for n in (0, 1))
    return packed.reshape(*rows, packed_width(K, bits, group)), scale.reshape(*rows, count)


def scales_of(
    w: Tensor, bits: int, scale_dtype: torch.dtype, importance: Tensor | None = None, curved: bool = True
) -> Tensor:
    """The scales [..., 1] of groups `w` [..., G], with the least squared error once they are rounded.

    8 bits take ``absmax / 127``; others the best of `RATIOS`, a signed one where zero is a level, so
    that the largest magnitude may use the lowest; 3 and 2 bits are then refined by least squares.

    Args:
        importance: weights of the squares, of a shape that broadcasts to `w`.
    """
    work = w.to(torch.float64 if w.dtype == torch.float64 else torch.float32)
    largest = work.gather(-1, work.abs().argmax(-1, keepdim=True))  # signed [..., 1]
    if bits == 8:
        return (largest.abs() / 127).to(scale_dtype)
    lowest = 2.0 ** (bits - 1)
    top = _points(largest.new_tensor(lowest - 1), bits, curved)
    whole = largest.abs() / top if grid_of(bits, curved).shift else -largest / lowest
    best = torch.full_like(largest, torch.inf)
    scale = whole.to(scale_dtype)  # of weights that no scale brings near: not finite, if they are not
    ratios = whole.new_tensor(RATIOS[bits] if bits != 3 or curved else UNIFORM).view(
        -1, *[1] * whole.dim()
    )
    for some in ratios.split(_at_once(work)):
        tried = (whole * some).to(scale_dtype)
        error, at = (
            _error(work, tried, bits, importance, curved).nan_to_num(nan=torch.inf).min(0, keepdim=True)
        )
        error, tried = error[0], tried.gather(0, at)[0]
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    for _ in range(REFINED[bits]):
        tried = _least_squares(work, scale, bits, importance, curved).to(scale_dtype)
        error = _error(work, tried, bits, importance, curved)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    return scale


def shared_scales(scale: Tensor, bits: int) -> Tensor:
    """Scales [..., groups] rounded to whole multiples of one unit in every superblock of 8 groups."""
    parts = scale.unflatten(-1, (-1, SUPERBLOCK))
    return multiples_of(parts, shared_unit(parts, bits), bits).flatten(-2)


def shared_unit(scale: Tensor, bits: int) -> Tensor:
    """The unit [..., 1] of a superblock with scales [..., 8]: of the three least that reach its largest
    one, that with the least squared error. The next is taken where all are multiples of it, so that
    scales that have a unit keep it."""
    most, places = MULTIPLES[bits]
    significand, exponent = torch.frexp(scale.abs().amax(-1, keepdim=True).float() / most)
    tried = (significand * 2**places).ceil() + torch.arange(4.0, device=scale.device)
    tried = torch.where(
        tried > 2**places, 2 * tried - 2**places, tried
    )  # beyond 1, steps are twice as wide
    units, wide = torch.ldexp(tried, exponent - places), scale.float().unsqueeze(-1)
    missed = (multiples_of(wide, units.unsqueeze(-2), bits) - wide).square().sum(-2)
    missed[..., 3].masked_fill_(missed[..., 3] > 0, torch.inf)
    return units.gather(-1, missed.argmin(-1, keepdim=True))


def multiples_of(scale: Tensor, unit: Tensor, bits: int) -> Tensor:
    """The nearest multiples of `unit`, which broadcasts, in the dtype of `scale`."""
    most = MULTIPLES[bits][0]
    count = torch.where(unit == 0, 0.0, scale.float() / unit).round().clamp(-most, most)
    return (count * unit).to(scale.dtype)


def _at_once(work: Tensor) -> int:
    """Ratios tried together: one on a CPU, whose caches hold no more; many on a GPU."""
    return max(CHUNK // max(work.numel(), 1), 1) if work.is_cuda else 1


def _error(work: Tensor, scale: Tensor, bits: int, importance: Tensor | None, curved: bool) -> Tensor:
    """What rounding with `scale` costs [..., 1]."""
    levels = levels_of(work, scale, bits, curved)
    missed = (values_of(levels, scale, bits, curved) - work).square()
    return (missed if importance is None else missed * importance).sum(-1, keepdim=True)


def levels_of(w: Tensor, scale: Tensor, bits: int, curved: bool = True) -> Tensor:
    """The nearest levels of `w` (float32 or float64), int8; 0 where the scale, which broadcasts, is."""
    top, grid = 2 ** (bits - 1), grid_of(bits, curved)
    unit = torch.where(scale == 0, 0.0, w / scale.to(w.dtype))
    if grid.curve:
        points = _points(torch.arange(-top, top, device=w.device, dtype=w.dtype), bits, curved)
        between = (points[1:] + points[:-1]) / 2
        return (torch.bucketize(unit, between, out_int32=True) - top).to(torch.int8)
    levels = (unit - grid.shift).round()
    return levels.clamp(-top + (bits == 8), top - 1).to(torch.int8)


def values_of(levels: Tensor, scale: Tensor, bits: int, curved: bool = True) -> Tensor:
    """What `levels` stand for: in float64 if the scale, which broadcasts, is, else in float32."""
    work = torch.float64 if scale.dtype == torch.float64 else torch.float32
    return _points(levels.to(work), bits, curved) * scale.to(work)


def dequantize(
    packed: Tensor,
    scale: Tensor,
    bits: int,
    K: int,
    dtype: torch.dtype,
    group: int = GROUP,
    curved: bool = True,
) -> Tensor:
    """Weights [..., R, K] in `dtype`: levels times scales in float32 (or float64), rounded once."""
    check_format(bits, group)
    wide = scale.to(torch.float64 if dtype == torch.float64 else torch.float32).unsqueeze(-1)
    levels = unpack(packed, bits, group).unflatten(-1, (-1, group))
    return values_of(levels, wide, bits, curved).flatten(-2)[..., :K].to(dtype)


def unpack(packed: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Levels int8 [..., R, K'] of packed rows, padding included."""
    size = group * bits // 8
    if bits == 8:
        return _fields(packed.unflatten(-1, (-1, size)), 8).flatten(-2)
    parts = packed.unflatten(-1, (-1, size)).split([group * width // 8 for width in PLANES[bits]], -1)
    codes = _fields(parts[0], PLANES[bits][0])
    for plane, width in zip(parts[1:], PLANES[bits][1:], strict=True):
        codes = codes | _fields(plane, width) << PLANES[bits][0]
    return (codes.to(torch.int8) - 2 ** (bits - 1)).flatten(-2)


def pack(levels: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """The inverse of `unpack`: [..., R, K'] of whole groups."""
    grouped = levels.unflatten(-1, (-1, group))
    if bits == 8:
        return _plane(grouped, 8).flatten(-2)
    codes, planes = (grouped + 2 ** (bits - 1)).to(torch.uint8), []
    for width in PLANES[bits]:
        planes.append(_plane(codes & (2**width - 1), width))
        codes = codes >> width
    return torch.cat(planes, -1).flatten(-2)


def _quantized(
    w: Tensor, bits: int, dtype: torch.dtype, costs: Tensor | None, curved: bool, superblocks: bool
) -> tuple[Tensor, Tensor]:
    """Packed rows and scales of groups `w` [R, groups, G]."""
    work = w.to(torch.float64 if w.dtype == torch.float64 else torch.float32)
    scale = scales_of(work, bits, dtype, costs, curved)
    scale = shared_scales(scale.squeeze(-1), bits).unsqueeze(-1) if superblocks else scale
    levels = levels_of(work, scale, bits, curved).flatten(-2)
    return pack(levels, bits, w.shape[-1]), scale.squeeze(-1)


def _costs(w: Tensor, bits: int, group: int, importance: Tensor | None, curved: bool) -> Tensor | None:
    """What errors in groups of `w` [..., K] cost: [groups, G], or [rows, groups, G]; zero of what is
    padded, which may be no level. None if all are alike."""
    K = w.shape[-1]
    if importance is None and (not grid_of(bits, curved).shift or K % group == 0):
        return None
    given = torch.ones(K, device=w.device) if importance is None else importance.to(w.device)
    if given.dim() > 1:
        given = given.expand(w.shape)
    grouped = torch.nn.functional.pad(given, (0, -K % group)).unflatten(-1, (-1, group))
    return grouped.flatten(0, -3) if given.dim() > 1 else grouped


def _least_squares(
    w: Tensor, scale: Tensor, bits: int, importance: Tensor | None, curved: bool
) -> Tensor:
    """The scales that are best for the levels that `scale` gives."""
    steps = _points(levels_of(w, scale, bits, curved).to(w.dtype), bits, curved)
    weighted = steps if importance is None else steps * importance
    return (weighted * w).sum(-1, keepdim=True) / (weighted * steps).sum(-1, keepdim=True).clamp_min(
        1e-30
    )


def _points(levels: Tensor, bits: int, curved: bool) -> Tensor:
    """What `levels`, as numbers, stand for where the scale is 1."""
    grid = grid_of(bits, curved)
    x = levels + grid.shift
    return x * (1 + grid.curve * x.square()) if grid.curve else x


def _plane(codes: Tensor, width: int) -> Tensor:
    """Bytes [..., G·width/8] of `codes` [..., G] below 2^width, as words of 32 / width fields."""
    fields = codes.unflatten(-1, (4, 8 // width, -1))  # [..., byte, field in it, word]
    byte = fields[..., 0, :]
    for place in range(1, 8 // width):
        byte = byte | fields[..., place, :] << place * width
    return byte.transpose(-1, -2).flatten(-2)


def _fields(plane: Tensor, width: int) -> Tensor:
    """The inverse of `_plane`."""
    byte = plane.unflatten(-1, (-1, 4)).transpose(-1, -2)  # [..., byte, word]
    if width == 8:
        return byte.flatten(-2)
    mask = 2**width - 1
    fields = [byte >> place * width & mask for place in range(8 // width)]
    return torch.stack(fields, -2).flatten(-3)
