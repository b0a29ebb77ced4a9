"""Runs the few instructions of the GPU that `kernels/layers/packed/unpacking.py` writes, in Python."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import torch


def run(
    text: str, outputs: int, inputs: Sequence[int | tuple[float, float]], dtype: torch.dtype
) -> list[list[float]]:
    """Pairs of numbers that instructions leave in their outputs.

    Args:
        text: of one block. inputs: words, or a pair of numbers of `dtype` in one word.
    """
    held = {f"${outputs + n}": _word(value, dtype) for n, value in enumerate(inputs)}
    for line in text.strip("{}\n").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and not name.startswith(".reg"):
            _step(name, _operands(rest), held, dtype)
    return [_pair(held[f"${n}"], dtype) for n in range(outputs)]


def _operands(rest: str) -> list[str]:
    return [part.strip() for part in re.findall(r"\{[^}]*\}|[^,]+", rest) if part.strip()]


def _word(value: int | tuple[float, float], dtype: torch.dtype) -> int:
    if isinstance(value, int):
        return value
    halves = torch.tensor(value, dtype=dtype).view(torch.int16).tolist()
    return (halves[0] & 0xFFFF) | (halves[1] & 0xFFFF) << 16


def _pair(word: int, dtype: torch.dtype) -> list[float]:
    return _halves(word, dtype).tolist()


def _halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.int16).view(dtype)


def _step(name: str, operands: list[str], held: dict[str, int], dtype: torch.dtype) -> None:
    into, *given = operands
    if into.startswith("{"):  # mov.b32 {low, high}, word
        low, high = into.strip("{}").replace(" ", "").split(",")
        held[low], held[high] = held[given[0]] & 0xFFFF, held[given[0]] >> 16
        return
    a, *more = (held[v] if v in held else _constant(v) for v in given)
    kind = name.split(".")[0]
    if kind == "prmt":
        both = a | more[0] << 32
        held[into] = sum((both >> 8 * (more[1] >> 4 * n & 7) & 255) << 8 * n for n in range(4))
    elif kind == "lop3":
        held[into] = a & more[0] | more[1]
    elif kind in ("shl", "shr", "xor", "mov"):
        made = {"shl": lambda: a << more[0], "shr": lambda: a >> more[0], "xor": lambda: a ^ more[0]}
        held[into] = made.get(kind, lambda: a)() & 0xFFFFFFFF
    elif kind == "cvt" and name.startswith("cvt.f32"):
        held[into] = _bits(float(_halves(a, dtype)[0]))
    elif kind == "cvt":
        held[into] = _word((_number(more[0]), _number(a)), dtype)
    elif name.endswith("x2"):
        held[into] = _packed(kind, [a, *more], dtype)
    else:
        left, right = _number(a), _number(more[0])
        held[into] = _bits(left - right if kind == "sub" else left * right)


def _packed(kind: str, words: list[int], dtype: torch.dtype) -> int:
    a, b, *c = (_halves(word, dtype).float() for word in words)
    made = {"sub": lambda: a - b, "mul": lambda: a * b, "fma": lambda: a * b + c[0]}[kind]()
    return _word(tuple(made.tolist()), dtype)


def _constant(text: str) -> int:
    return int(text[2:], 16) if text.startswith("0f") else int(text, 0)


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _number(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])
