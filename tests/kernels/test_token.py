"""Inputs that the kernel of a whole token makes, by its own text with torch in place of Gluon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")
from blr.kernels.decode.token import inputs, ring, sums, tables

KC, CHUNKS, SPLIT, D = 2, 5, 3, 64  # the first chunk, how many, programs of a head, its width


def test_tables_have_the_constants_of_the_kernel() -> None:
    assert (sums.WORDS.value, ring.ROWS.value) == (tables.WORDS, tables.TILE)
    assert inputs.AT_ONCE.value * inputs.TIMES.value == tables.CHUNKS
    flags = inputs.NORM.value, inputs.GATE.value, inputs.PARTS.value
    assert flags == (tables.NORM, tables.GATE, tables.PARTS)


class Pointer:
    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.at + more)


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0, **_: str) -> Tensor:
    if mask is None:
        return pointer.data[pointer.at]
    return torch.where(mask, pointer.data[torch.where(mask, pointer.at, 0)], other)


class Shared:
    """A tensor in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.store = data, data.dtype, data.copy_

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))


TORCH: dict[str, Any] = {
    name: getattr(torch, name) for name in ("where", "exp", "exp2", "maximum", "float32")
}
TORCH |= {
    "load": load,
    "static_range": range,
    "num_warps": lambda: 8,
    "arange": lambda start, end, layout: torch.arange(start, end),
    "expand_dims": torch.unsqueeze,
    "permute": torch.permute,
    "reshape": torch.reshape,
    "minimum": lambda a, b: a.clamp(max=b),
    "BlockedLayout": lambda *parts: parts,
    "SliceLayout": lambda *parts: parts,
}


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`inputs.stage`, run by torch."""
    for module in (inputs, sums):
        monkeypatch.setattr(module, "gl", SimpleNamespace(**TORCH))
    for name in ("NORM", "GATE", "PARTS", "AT_ONCE"):
        monkeypatch.setattr(inputs, name, getattr(inputs, name).value)
    monkeypatch.setattr(sums, "ONE", sums.ONE.value)
    for name in ("number", "joined", "placed"):
        monkeypatch.setattr(inputs, name, getattr(inputs, name).fn)
    return inputs.stage.fn


def staged(run: Any, K: int, flags: int, data: Tensor, parts: Tensor, gains: Tensor) -> Tensor:
    """[CHUNKS, 128], both halves together in the order of columns."""
    made = Shared(torch.zeros(2, 16, 256, dtype=torch.bfloat16))
    memory = tuple(map(Pointer, ((data.double() * 2**32).long(), parts, gains)))
    words = [0] * 20
    words[1:4], words[5], words[11] = [KC, CHUNKS, K // 8], 2 * K // 8, flags
    if flags & 4:
        words[5] = K * SPLIT // 8
    run(made, memory, words, CHUNKS, 2.0, SimpleNamespace(D=D, SPLIT=SPLIT, HIDDEN=K))
    high, low = made.data[0, :CHUNKS].float().split(128, dim=1)
    return (high + low).reshape(CHUNKS, 4, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(CHUNKS, 128)


def columns(wanted: Tensor) -> Tensor:
    """[CHUNKS, 128] of a row: the last tile ends with it and has zeros where others had it."""
    K, rows = len(wanted), []
    for k in ((KC + i) % CHUNKS for i in range(CHUNKS)):
        at = min(k * 128, K - 128) + torch.arange(128)
        rows.append(torch.where(at >= k * 128, wanted[at], 0))
    return torch.stack(rows)


@pytest.mark.parametrize("K", [576, 640])
@pytest.mark.parametrize("flags", [0, 1, 2, 4], ids=["plain", "normed", "gated", "attended"])
def test_inputs_are_those_of_their_columns(flags: int, K: int, in_torch: Any) -> None:
    torch.manual_seed(0)
    data, gains = torch.randn(3 * K), torch.randn(K)
    heads, exponents = torch.randn(K // D, SPLIT, D), torch.randn(K // D, SPLIT, 2).abs()
    parts = torch.cat((heads.flatten(), exponents.flatten()))
    weights = torch.exp2(exponents[..., 0] - exponents[..., 0].amax(1, keepdim=True))
    total = (weights * exponents[..., 1]).sum(1, keepdim=True)
    wanted = {
        0: data[:K],
        1: data[:K] * gains * 2,
        2: torch.nn.functional.silu(data[:K]) * data[2 * K :],
        4: ((heads * weights[..., None]).sum(1) / total).flatten(),
    }
    found = staged(in_torch, K, flags, data, parts, gains)
    torch.testing.assert_close(found, columns(wanted[flags]), atol=1e-4, rtol=1e-4)
