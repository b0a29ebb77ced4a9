"""Writes files in GGUF: the header, and tensors in the types that llama.cpp computes with. The header
has numbers, texts and lists by key, then name, sizes, type and place of every tensor. The tensors
follow, each at a multiple of `ALIGNMENT` bytes. Sizes are listed from the fastest axis on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from struct import pack

import torch
from torch import Tensor

from blr.compressor.exporting.tensors import Make, Tensors
from blr.kernels.decode.quantized.formats import MULTIPLES, OFFSET, SUPERBLOCK

ALIGNMENT, VERSION, BLOCK = 32, 3, 32
TYPES = {  # of tensors: number, and the bytes of so many numbers
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2)},
    **{"Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110)},
}
Values = Mapping[str, object]


@dataclass
class File:
    """One file while it is planned: `values` by key, and `tensors`, whose bytes are made later."""

    values: Values
    tensors: Tensors
    infos: list[bytes] = field(default_factory=list)
    place: int = 0

    def add(self, name: str, kind: str, shape: tuple[int, ...], make: Make) -> None:
        """Add a tensor in one of `TYPES`. `make` computes its numbers, or its blocks as bytes."""
        number, each, width = TYPES[kind]
        nbytes = prod(shape) // each * width
        sizes = b"".join(pack("<Q", size) for size in reversed(shape))
        self.infos.append(_text(name) + pack("<I", len(shape)) + sizes + pack("<IQ", number, self.place))
        filled = nbytes + -nbytes % ALIGNMENT
        self.tensors.add_made(name, "U8", (filled,), partial(_filled, make, filled))
        self.place += filled

    def header(self) -> bytes:
        """All bytes before the tensors."""
        entries = b"".join(_text(key) + _value(value) for key, value in self.values.items())
        counts = pack("<IQQ", VERSION, len(self.infos), len(self.values))
        head = b"GGUF" + counts + entries + b"".join(self.infos)
        return head + bytes(-len(head) % ALIGNMENT)


def _filled(make: Make, nbytes: int) -> Tensor:
    found = make().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(found, (0, nbytes - len(found)))


def _text(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    """Type and bytes of a value: whole numbers are unsigned, those of lists signed."""
    if isinstance(value, list):
        kind, form = {str: (8, ""), int: (5, "<i"), float: (6, "<f")}[type(value[0])]
        items = b"".join(_text(item) if kind == 8 else pack(form, item) for item in value)
        return pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, str):
        return pack("<I", 8) + _text(value)
    kind, form = {bool: (7, "<I?"), int: (4, "<II"), float: (6, "<If")}[type(value)]
    return pack(form, kind, value)


def blocks(levels: Tensor, scale: Tensor, bits: int) -> Tensor:
    """A weight as Q8_0 (of 8 bits) or Q4_0, with the values that it has: bytes [o, ...]. levels: int8
    [o, i] of 8, 4 or 2 bits, or of 3 on the uniform grid. scale: [o, i/32].

    A block of 32 numbers is a scale in float16 and the levels: signed bytes, or halves of bytes that
    hold level + 8, the first 16 in the low ones. Of 2 bits the levels, half-integers, are doubled and
    the scales halved."""
    doubled = bits == 2
    steps = (scale / 2 if doubled else scale).to(torch.float16)
    held = (2 * levels + 1 if doubled else levels).unflatten(-1, (-1, BLOCK))
    if bits != 8:
        low, high = (held + int(OFFSET[4])).to(torch.uint8).chunk(2, -1)
        held = low | high << 4
    return torch.cat([steps.unsqueeze(-1).view(torch.uint8), held.view(torch.uint8)], -1).flatten(-2)


def superblocks(levels: Tensor, scale: Tensor, bits: int) -> Tensor:
    """A weight as Q2_K or Q3_K, with the values that it has: bytes [o, ...]. levels: int8 [o, i] of 2
    bits, or of 3 on the uniform grid. scale: [o, i/32], of superblocks.

    A superblock has 256 numbers, in 16 blocks of 16 with a scale each. Every 32 share one here. Two
    bits of a number lie in bytes of four, from places 32 apart. Q2_K is ``d · k · q − dmin · m``, of 4
    bits k and m; here m is k and dmin 1.5 d. Q3_K is ``d · k · (q − 4)``, of 6 bits k."""
    parts = scale.float().unflatten(-1, (-1, SUPERBLOCK))
    unit, count = counted(parts, bits)
    levels = levels.unflatten(-1, (-1, 8 * BLOCK))
    if bits == 2:  # a negative scale is that of mirrored levels
        levels = torch.where(count.repeat_interleave(BLOCK, -1) < 0, -1 - levels, levels)
    codes = (levels + 2 ** (bits - 1)).to(torch.uint8)
    low = _joined((codes & 3).unflatten(-1, (2, 4, 32)), 2)
    each = count.repeat_interleave(2, -1)  # of blocks of 16
    steps = unit.to(torch.float16).view(torch.uint8)
    if bits == 2:
        held = each.abs().to(torch.uint8)
        found = held | held << 4, low, steps, (1.5 * unit).to(torch.float16).view(torch.uint8)
    else:
        high = _joined((codes >> 2).unflatten(-1, (8, 32)), 1)
        found = high, low, _six_bits((each + 32).to(torch.uint8)), steps
    return torch.cat(found, -1).flatten(-2)


def counted(scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A unit [..., 1] that float16 holds, and whole numbers [..., 8] that make `scale` [..., 8] with it.
    Both are not a number where there is none."""
    top = scale.abs().amax(-1, keepdim=True)
    unit, count = torch.full_like(top, torch.nan), torch.full_like(scale, torch.nan)
    for most in range(MULTIPLES[bits][0], 0, -1):
        tried = top / most
        held = torch.where(tried == 0, 0.0, scale / tried).round()
        exact = (held * tried == scale).all(-1, keepdim=True) & unit.isnan()
        exact &= (1.5 * tried).to(torch.float16) == 1.5 * tried
        exact &= tried.to(torch.float16) == tried
        unit, count = torch.where(exact, tried, unit), torch.where(exact, held, count)
    return unit, count


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes [o, superblocks, ..., n, w] of `bits`, the first of n in the lowest places."""
    places = bits * torch.arange(codes.shape[-2], dtype=torch.uint8).unsqueeze(-1)
    return (codes << places).sum(-2, dtype=torch.uint8).flatten(2)


def _six_bits(held: Tensor) -> Tensor:
    """Bytes [..., 12] of numbers [..., 16] of 6 bits: four bits of two, then two bits of four."""
    low, high = held & 15, held >> 4
    return torch.cat([low[..., :8] | low[..., 8:] << 4, _joined(high.unflatten(-1, (4, 4)), 2)], -1)
