"""Writes files in GGUF: the header, and tensors in the types that llama.cpp computes with.

The header has numbers, texts and lists by key, then name, sizes, type and place of every tensor. The
tensors follow, each at a multiple of `ALIGNMENT` bytes. Sizes are listed from the fastest axis on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from struct import pack

import torch
from torch import Tensor

from blr.compressor.exporting.tensors import Make, Tensors
from blr.kernels.decode.quantized.formats import OFFSET

ALIGNMENT, VERSION, BLOCK = 32, 3, 32
F32, F16, Q4_0, Q8_0, BF16 = 0, 1, 2, 8, 30  # the numbers of types of tensors
BYTES = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34), BF16: (1, 2)}  # of so many numbers
PLAIN = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
Values = Mapping[str, object]


@dataclass
class File:
    """One file while it is planned: `values` by key, and `tensors`, whose bytes are made later."""

    values: Values
    tensors: Tensors
    infos: list[bytes] = field(default_factory=list)
    place: int = 0

    def add(self, name: str, kind: int, shape: tuple[int, ...], origin: Path, make: Make) -> None:
        """Add a tensor of `shape` in a type of `BYTES`. `make` computes it: in a plain type the numbers,
        else the blocks as bytes."""
        numbers, width = BYTES[kind]
        nbytes = prod(shape) // numbers * width
        sizes = b"".join(pack("<Q", size) for size in reversed(shape))
        self.infos.append(_text(name) + pack("<I", len(shape)) + sizes + pack("<IQ", kind, self.place))
        filled = nbytes + -nbytes % ALIGNMENT
        self.tensors.add_made(name, "U8", (filled,), origin, partial(_filled, make, filled))
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
    """A weight as Q8_0 (of 8 bits) or Q4_0, with the values that it has: bytes [o, ...].

    A block of 32 numbers is a scale in float16 and the levels: signed bytes, or halves of bytes that
    hold level + 8, the first 16 in the low ones. Of 2 bits the levels, half-integers, are doubled and
    the scales halved.

    Args:
        levels: int8 [o, i] of 8, 4 or 2 bits, or of 3 on the uniform grid. scale: [o, i/32].
    """
    doubled = bits == 2
    steps = (scale / 2 if doubled else scale).to(torch.float16)
    held = (2 * levels + 1 if doubled else levels).unflatten(-1, (-1, BLOCK))
    if bits != 8:
        low, high = (held + int(OFFSET[4])).to(torch.uint8).chunk(2, -1)
        held = low | high << 4
    return torch.cat([steps.unsqueeze(-1).view(torch.uint8), held.view(torch.uint8)], -1).flatten(-2)
