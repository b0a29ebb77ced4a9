"""Weights in few bits as plain numbers: the kernel in the interpreter, and the layer's operator."""

from itertools import product as combinations

import pytest
import torch
from tolerances import TOLERANCES

from blr.compressor.modeling.layers import layer_of
from blr.compressor.modeling.stages import Packed
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec
from blr.kernels.decode.quantized.formats import PLANES
from blr.kernels.decode.quantized.reference import dequantize as reference
from blr.kernels.decode.quantized.reference import quantize
from blr.kernels.layers.packed.op import packed_linear


def weight(
    bits: int, group: int, rows: int, columns: int, curved: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(bits + group))
    packed, scale = quantize(w, bits, torch.float32, group, curved=curved)
    scale[0], scale[1] = 0.0, -scale[1]
    return packed, scale


@pytest.mark.parametrize("columns", [256, 200, 33])
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize(("bits", "curved"), [(8, True), (4, True), (3, True), (3, False), (2, True)])
def test_same_numbers(bits: int, curved: bool, group: int, columns: int) -> None:
    """The kernel gives the numbers of the reference, also of scales that are zero or negative, of rows
    that are no whole tile, and of columns that end inside a group."""
    from blr.kernels.layers.packed.triton import dequantize

    packed, scale = weight(bits, group, 19, columns, curved)
    form = bits, columns, torch.float32, group, curved
    found = dequantize(packed, scale, *form)
    assert torch.equal(found, reference(packed, scale, *form))
    stacked = dequantize(packed[None], scale[None], *form)
    assert torch.equal(stacked[0], found)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite(bad: float) -> None:
    """A scale or an input that is not finite gives what the dense weight gives."""
    packed, scale = weight(4, 32, 8, 64)
    scale[2, 1] = bad
    x = torch.randn(3, 64)
    x[1, 5] = bad
    dense = reference(packed, scale, 4, 64, torch.float32, 32)
    found = packed_linear(x, packed, scale, None, 4, 32)
    torch.testing.assert_close(found, x @ dense.T, equal_nan=True)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("bits", [4, 3])
def test_gradients(bits: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs and bias, as through the dense weight; also where it is made part by part."""
    packed, scale = weight(bits, 64, 40, 96)
    dense = reference(packed, scale, bits, 96, torch.float32, 64)
    g, found, expected = torch.randn(2, 5, 40), [], []
    monkeypatch.setattr("blr.kernels.layers.packed.op.WHOLE", 96 * 16)
    for product, into in ((lambda x, b: packed_linear(x, packed, scale, b, bits, 64), found),
                          (lambda x, b: torch.nn.functional.linear(x, dense, b), expected)):  # fmt: skip
        x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        b = torch.ones(40, requires_grad=True) if biased else None
        y = product(x, b)
        y.backward(g)
        into += [y.detach(), x.grad, *([b.grad] if b is not None else [])]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= TOLERANCES[torch.float32] * other.norm()


def test_a_correction_is_added() -> None:
    """With u and v the product is that of W + u v, and so are the gradients of x and of the bias."""
    torch.manual_seed(0)
    packed, scale = weight(4, 64, 40, 96)
    u, v, g = torch.randn(40, 5), torch.randn(5, 96), torch.randn(2, 40)
    dense = reference(packed, scale, 4, 96, torch.float32, 64) + u @ v
    found, expected = [], []
    for product, into in ((lambda x, b: packed_linear(x, packed, scale, b, 4, 64, u=u, v=v), found),
                          (lambda x, b: torch.nn.functional.linear(x, dense, b), expected)):  # fmt: skip
        x, b = torch.ones(2, 96).requires_grad_(), torch.ones(40, requires_grad=True)
        y = product(x, b)
        y.backward(g)
        into += [y.detach(), x.grad, b.grad]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= TOLERANCES[torch.float32] * other.norm()


def test_compiled_without_a_break() -> None:
    """`torch.compile` sees one operator."""
    packed, scale = weight(2, 32, 16, 64)
    x = torch.randn(3, 64)
    run = torch.compile(
        lambda x: packed_linear(x, packed, scale, None, 2, 32) + 1, fullgraph=True, backend="aot_eager"
    )
    expected = x @ reference(packed, scale, 2, 64, torch.float32, 32).T + 1
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_makes_few_plain_weights_at_a_time(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels do not run, a large weight, as of an output head, is not made plain as a whole."""
    layer = layer_of(QuantizedSpec(DenseSpec(64, 40), 4, 32), biased)
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    layer.weight_q, layer.weight_scale = quantize(w, 4, torch.float32, 32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    made, dequantized, expected = [], Packed.dequantized, layer(x).detach()

    def noted(packed: Packed) -> torch.Tensor:
        made.append(packed.shape[0])
        return dequantized(packed)

    monkeypatch.setattr("blr.compressor.modeling.layers.WHOLE", 64 * 16)
    monkeypatch.setattr(Packed, "dequantized", noted)
    found = layer(x).detach()
    assert made == [16, 16, 8]
    assert (found - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()


@pytest.mark.parametrize("columns", [512, 200])
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_inputs_in_the_order_of_fields(bits: int, group: int, columns: int) -> None:
    """Field f of word j of a step meets the input of its element, and zeros past the end."""
    from blr.kernels.layers.packed.launch import steps_of
    from blr.kernels.layers.packed.prepare import prepare

    low = PLANES[bits][0]
    words, fields = group * low // 32, 32 // low
    x = torch.arange(1.0, columns + 1).repeat(2, 1)
    found = prepare(x, bits, group).x
    place = torch.arange(found.shape[1])
    word = place // (16 * fields) * 16 + place % 16
    element = word // words * group + place // 16 % fields * words + word % words
    assert found.shape[1] in (columns, steps_of(columns, bits, group) * 16 * fields)
    assert torch.equal(found[1], torch.where(element < columns, element + 1, 0).float())


@pytest.mark.parametrize("tokens, columns, ranks", [(1, 512, 16), (19, 1400, 5), (40, 96, 33)])
@pytest.mark.parametrize("bits", [4, 2])
def test_first_factors_and_counters_are_prepared(
    bits: int, tokens: int, columns: int, ranks: int
) -> None:
    """V x of a correction comes in parts that sum up to it; counters are zero; inputs are the same."""
    from blr.kernels.layers.packed.prepare import prepare

    torch.manual_seed(tokens)
    x, v = torch.randn(tokens, columns), torch.randn(ranks, columns)
    found = prepare(x, bits, 128, v, counters=1100)
    assert torch.equal(found.x, prepare(x, bits, 128).x)
    assert found.z is not None and found.counter is not None and not found.counter.any()
    expected = x @ v.T
    assert (found.z.sum(0) - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()


def test_tiles_fit_the_gpu_and_no_part_is_empty() -> None:
    """Whatever the shape, the rings fit into shared memory and every part of a row has a step."""
    from blr.kernels.layers.packed.launch import SHARED, default_tile, ring_bytes, steps_of

    for bits, rows, columns, tokens in combinations(
        (8, 4, 3, 2), (1, 130, 14336), (33, 576, 14336), (1, 9, 65, 700)
    ):
        tile = default_tile(rows, columns, bits, 64, tokens)
        steps = steps_of(columns, bits, 64)
        assert ring_bytes(bits, tile) <= SHARED and tile.STAGES >= 4
        assert (tile.SPLIT - 1) * -(-steps // tile.SPLIT) < steps


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("bits, curved", [(8, True), (4, True), (3, True), (3, False), (2, True)])
def test_instructions_unpack_fields(bits: int, curved: bool, name: str, dtype: torch.dtype) -> None:
    """The instructions, run one by one, give each field's level times its scale."""
    from ptx import run

    from blr.kernels.layers.packed.unpacking import instructions

    generator = torch.Generator().manual_seed(bits)
    group = 128
    x = torch.randn(1, group, generator=generator)
    packed, scale = quantize(x, bits, torch.float32, group, curved=curved)
    scale = torch.full_like(scale, 0.75)
    expected = reference(packed, scale, bits, group, torch.float32, group, curved)[0]
    words = [int(w) & 0xFFFFFFFF for w in packed.view(torch.int32)[0]]
    count = group * PLANES[bits][0] // 32
    given = [words[0], words[1]]
    if bits == 3:
        high = [words[count + j % 4] >> (j // 4) for j in (0, 1)]
        given = [(w & 0x33333333) | (h << 2 & 0x44444444) for w, h in zip(words[:2], high, strict=True)]
        given += [(w >> 2 & 0x33333333) | (h & 0x44444444) for w, h in zip(words[:2], high, strict=True)]
    found = []
    for text, operands in instructions(bits, curved, name):
        found += run(text, operands.count("="), [*given, (0.75, 0.75)], dtype)
    for field, pair in enumerate(found):
        assert pair == pytest.approx([float(expected[field * count + j]) for j in (0, 1)], rel=0.01)
