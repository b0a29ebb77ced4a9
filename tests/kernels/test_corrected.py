"""Stages of few bits with a correction: every format. Interpreter only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv.segments import Correction, How, Narrow, QuantizedSegment, Segment
from blr.kernels.decode.quantized.formats import BITS, GROUPS
from blr.kernels.decode.quantized.reference import quantize, unpack

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
FORMATS = [(bits, group) for bits in BITS for group in GROUPS]
FORMATS += [(3, group, 0) for group in GROUPS]
TOKENS = pytest.mark.parametrize("tokens", [1, 2, 3])


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error < TOLERANCES[torch.float32]


def quantized(x: torch.Tensor, rows: int, form: tuple[int, ...], **more: Any) -> QuantizedSegment:
    """form: bits and group, and 0 for the uniform grid of 3 bits."""
    bits, group, more["curved"] = (*form, 1)[:3]
    w = torch.randn(1, rows, x.shape[1]) / x.shape[1] ** 0.5
    packed, scale = quantize(w, bits, group=group, curved=more["curved"])
    y = torch.full((len(x), rows), float("nan"))
    return QuantizedSegment(x, packed, scale, bits, x.shape[1], y, group=group, **more)


def narrow(rows: int, ranks: int, blocks: int = 1) -> Narrow:
    packed, scale = quantize(torch.randn(blocks, rows // blocks, ranks) / ranks**0.5, 4, group=32)
    return Narrow(unpack(packed, 4, 32)[..., :ranks].contiguous(), scale, 32)


def corrected(
    tokens: int, rows: int, ranks: int, K: int, form: tuple[int, ...], x: torch.Tensor | None = None
) -> QuantizedSegment:
    x = torch.randn(tokens, K) if x is None else x
    first = quantized(x, ranks, (4, 64))
    made = Correction(first, narrow(rows, ranks))
    return quantized(x, rows, form, correction=made, bias=torch.randn(rows))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("K", "tokens"), [(90, 1), (328, 1), (328, 3)])
def test_every_format_is_multiplied_as_it_is_dequantized(
    K: int, tokens: int, form: tuple[int, ...]
) -> None:
    """Rows of odd numbers of groups, of half quads, of one chunk and of several."""
    from blr.kernels.decode.quantized.launch import grouped

    torch.manual_seed(0)
    s, options = quantized(torch.randn(tokens, K), 7, form), {"gain": torch.rand(K), "eps": 1e-5}
    grouped([s], How(**options), {"BQ": 8})
    assert near(s.y, replace(s, x=s.x.double()).product(**options))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_full_tiles_need_no_masks(form: tuple[int, ...]) -> None:
    from blr.kernels.decode.quantized.formats import form_of
    from blr.kernels.decode.quantized.launch import complete, grouped, quantized_tile

    torch.manual_seed(0)
    s = quantized(torch.randn(1, 512), 8, form)
    shape = {"BR": 8, "BQ": form_of(*form).quads(512), "num_warps": 1}
    assert quantized_tile(s, complete(shape, 1), None).FULL
    grouped([s], config=shape)
    assert near(s.y, replace(s, x=s.x.double()).product(None, 0.0))


@pytest.mark.parametrize("form", [f for f in FORMATS if f[0] == 4], ids=str)
def test_products_of_bytes_are_as_exact_as_half_precision(form: tuple[int, ...]) -> None:
    """Inputs of one sign, where the offsets of levels weigh most, and one that is far larger."""
    from blr.kernels.decode.quantized.launch import grouped

    torch.manual_seed(0)
    x = torch.rand(2, 328) + 1
    x[:, 7] = 100
    s, options = quantized(x, 7, form), {"gain": torch.rand(328), "eps": 1e-5}
    s = replace(s, scale=s.scale.half())
    grouped([s], How(**options), {"BQ": 8, "BYTES": 1})
    expected = replace(s, x=x.double()).product(**options)
    assert float((s.y - expected).norm() / expected.norm()) < TOLERANCES[torch.float16] / 10


@TOKENS
def test_corrections_after_a_launch_of_their_own(tokens: int) -> None:
    """V and U of plain numbers, and blocks that see z of their own."""
    from blr.kernels.decode.quantized.launch import grouped

    torch.manual_seed(0)
    x = torch.randn(tokens, 200)
    z = torch.full((tokens, 15), float("nan"))
    first = Segment(x, torch.randn(3, 5, 200), z)
    s = quantized(x, 12, (3, 128), correction=Correction(first, Narrow(torch.randn(3, 4, 5))))
    expected = s.product(None, 0.0)
    grouped([s])
    assert near(s.y, expected)


@pytest.mark.parametrize("correct", [False, True], ids=["", "corrected"])
def test_pairs_as_rows_of_one_launch(correct: bool) -> None:
    """Gate and up in int4, four bytes an instruction, and their product by a launch of its own."""
    from blr.kernels.decode import choice

    torch.manual_seed(0)
    width = 200 if correct else choice.LONG
    x, options = torch.randn(1, width), {"gain": torch.rand(width), "eps": 1e-5}
    if correct:
        gate, up = (corrected(1, 9, 5, width, (2, 128), x) for _ in range(2))
    else:
        gate, up = (quantized(x, 9, (4, 128)) for _ in range(2))
        gate, up = (replace(s, scale=s.scale.half()) for s in (gate, up))
    expected = torch.nn.functional.silu(gate.product(**options)) * up.product(**options)
    choice.stages([gate, up], How(**options, activation="silu"))()
    assert float((up.y - expected).norm() / expected.norm()) < TOLERANCES[torch.float16]
