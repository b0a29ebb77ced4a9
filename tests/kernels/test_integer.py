"""Products of bytes with inputs made once, as words: against the same stages dequantized. Interpreter
only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv.segments import Correction, How, Narrow, QuantizedSegment
from blr.kernels.decode.quantized.reference import quantize, unpack

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
FORMATS = [(2, 128), (2, 64), (3, 128), (3, 64), (3, 128, 0), (3, 64, 0)]
FOUR = [(4, 128), (4, 64), (4, 32)]
# Inputs are integers of 16 bits, far below half precision; levels of three bits are bytes, whose
# rounding is that of weights in bfloat16.
FINE = TOLERANCES[torch.float16] / 10
EXACT = {2: FINE, 3: TOLERANCES[torch.bfloat16], 4: FINE}


def quantized(x: torch.Tensor, rows: int, form: tuple[int, ...], **more: Any) -> QuantizedSegment:
    """form: bits and group, and 0 for the uniform grid of 3 bits."""
    bits, group, more["curved"] = (*form, 1)[:3]
    w = torch.randn(1, rows, x.shape[1]) / x.shape[1] ** 0.5
    packed, scale = quantize(w, bits, group=group, curved=more["curved"])
    y = torch.full((len(x), rows), float("nan"))
    return QuantizedSegment(x, packed, scale.half(), bits, x.shape[1], y, group=group, **more)


def corrected(x: torch.Tensor, rows: int, ranks: int, form: tuple[int, ...]) -> QuantizedSegment:
    packed, scale = quantize(torch.randn(1, rows, ranks) / ranks**0.5, 4, group=32)
    u = Narrow(unpack(packed, 4, 32)[..., :ranks].contiguous(), scale, 32)
    made = Correction(quantized(x, ranks, (4, 64)), u)
    return quantized(x, rows, form, correction=made, bias=torch.randn(rows))


def near(found: torch.Tensor, expected: torch.Tensor, bits: int) -> bool:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error < EXACT[bits]


def exact_of(form: tuple[int, ...]) -> int:
    """Bits of a format whose levels as bytes are as exact: of uniform ones they are whole."""
    return 2 if len(form) > 2 else form[0]


def test_levels_of_three_bits_as_bytes_are_as_exact_as_bfloat16() -> None:
    from blr.kernels.decode.integer.launch import THREE, THREE_SCALE, table
    from blr.kernels.decode.quantized.formats import CURVE

    for level, x in zip(THREE, (0.5, 1.5, 2.5, 3.5), strict=True):
        assert abs(level / THREE_SCALE / (x * (1 + CURVE[3] * x * x)) - 1) < 2**-7
    found = b"".join(word.to_bytes(4, "little", signed=True) for word in table())
    assert [*memoryview(found).cast("b")] == [-122, -79, -44, -14, 14, 44, 79, 122]
    found = b"".join(word.to_bytes(4, "little", signed=True) for word in table(curved=False))
    assert [*memoryview(found).cast("b")] == [*range(-4, 4)]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("K", [90, 512, 1000])
def test_rows_of_every_format(K: int, form: tuple[int, ...]) -> None:
    """Inputs of one sign, where the offsets of levels weigh most, and one that is far larger; rows that
    are no multiple of a tile, and padded columns."""
    from blr.kernels.decode.integer.launch import byte_stages

    torch.manual_seed(0)
    x = torch.rand(1, K) + 1
    x[:, 7] = 100
    s, options = quantized(x, 37, form), {"gain": torch.rand(K), "eps": 1e-5}
    byte_stages([s], (), How(**options))()
    assert near(s.y, replace(s, x=x.double()).product(**options), exact_of(form))


@pytest.mark.parametrize("form", [(2, 128), (3, 64), (3, 64, 0)], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_corrections_are_made_beside_the_inputs(count: int, normed: bool, form: tuple[int, ...]) -> None:
    """Of several stages, stored and added to what is there; z of before is not read."""
    from blr.kernels.decode.integer.launch import byte_stages, taken

    torch.manual_seed(0)
    x = torch.randn(1, 200)
    made = [corrected(x, 9 + 8 * n, 5 + 15 * n, form) for n in range(count)]
    options = {"gain": torch.rand(200), "eps": 1e-5} if normed else {"gain": None, "eps": 0.0}
    expected = [s.product(**options) for s in made]
    firsts = [s.correction.first for s in made if s.correction]
    for first in firsts:
        first.y.fill_(float("nan"))
    assert taken(made)
    byte_stages(made, firsts, How(**options))()
    assert all(near(s.y, y, exact_of(form)) for s, y in zip(made, expected, strict=True))
    byte_stages(made, firsts, How(add=True, **options))()
    assert all(near(s.y, 2 * y, exact_of(form)) for s, y in zip(made, expected, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FOUR, ids=str)
@pytest.mark.parametrize("K", [90, 512, 1000])
@pytest.mark.parametrize("rows", [(3,), (300, 37), (9, 100, 270)], ids=str)
def test_programs_of_four_bits_have_many_tiles(
    rows: tuple[int, ...], K: int, form: tuple[int, ...]
) -> None:
    """More than there are programs, and fewer; several stages, stored and added to what is there."""
    from blr.kernels.decode.integer.launch import byte_stages

    torch.manual_seed(0)
    x = torch.rand(1, K) + 1
    x[:, 7] = 100
    made = [quantized(x, n, form, bias=torch.randn(n)) for n in rows]
    options = {"gain": torch.rand(K), "eps": 1e-5}
    expected = [replace(s, x=x.double()).product(**options) for s in made]
    byte_stages(made, (), How(**options))()
    assert all(near(s.y, y, 4) for s, y in zip(made, expected, strict=True))
    byte_stages(made, (), How(add=True, **options))()
    assert all(near(s.y, 2 * y, 4) for s, y in zip(made, expected, strict=True))


@pytest.mark.parametrize("rows", [5, 260])
def test_pairs_of_four_bits_leave_their_gated_product(rows: int) -> None:
    from blr.kernels.decode import choice

    torch.manual_seed(0)
    x, options = torch.randn(1, 512), {"gain": torch.rand(512), "eps": 1e-5}
    gate, up = (quantized(x, rows, (4, 128)) for _ in range(2))
    expected = torch.nn.functional.silu(gate.product(**options)) * up.product(**options)
    choice.bytewise([gate, up], How(**options, activation="silu"))()
    assert near(up.y, expected, 3)


def test_inputs_of_zero_give_the_bias() -> None:
    from blr.kernels.decode.integer.launch import byte_stages

    torch.manual_seed(0)
    s = quantized(torch.zeros(1, 256), 20, (2, 128), bias=torch.randn(20))
    byte_stages([s], (), How(torch.rand(256), 1e-5))()
    assert torch.equal(s.y[0], s.bias)


def test_other_stages_are_not_taken() -> None:
    from blr.kernels.decode.integer.launch import taken

    x, other = torch.randn(1, 256), torch.randn(1, 256)
    s = quantized(x, 8, (2, 128))
    assert taken([s, s])
    assert not taken([s, quantized(other, 8, (2, 128))])
    assert not taken([s, quantized(x, 8, (3, 128))])
    assert not taken([quantized(torch.randn(2, 256), 8, (2, 128))])
    assert not taken([quantized(x, 8, (2, 32))])
    assert taken([quantized(x, 8, (4, 32))])
    assert not taken([corrected(x, 8, 5, (4, 128))])
    assert not taken([replace(s, scale=s.scale.float())])
    assert not taken([quantized(torch.randn(1, 1 << 16), 1, (2, 128))])


@pytest.mark.parametrize("form", [(2, 128), (3, 64), (3, 64, 0)], ids=str)
@pytest.mark.parametrize("rows", [5, 260])
def test_pairs_of_few_bits_leave_their_gated_product(rows: int, form: tuple[int, ...]) -> None:
    """With corrections made beside the inputs, in no more than two launches."""
    from blr.kernels.common.launching import noting
    from blr.kernels.decode import choice

    torch.manual_seed(0)
    x, options = torch.randn(1, 512), {"gain": torch.rand(512), "eps": 1e-5}
    gate, up = (corrected(x, rows, 16, form) for _ in range(2))
    expected = torch.nn.functional.silu(gate.product(**options)) * up.product(**options)
    with noting() as launches:
        choice.bytewise([gate, up], How(**options, activation="silu"))()
    assert len(launches) == 2
    assert near(up.y, expected, 3)
