"""Products of packed weights on a GPU: every format, any number of tokens, shapes that fill no tile."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
from tolerances import TOLERANCES

from blr.compressor.modeling.layers import layer_of
from blr.compressor.modeling.packed_products import packed_product
from blr.compressor.structures.specs import CorrectedSpec, DenseSpec, LowRankSpec, QuantizedSpec
from blr.kernels.decode.quantized.reference import dequantize, quantize
from blr.kernels.layers.packed import launch
from blr.kernels.layers.packed.op import packed_linear

pytestmark = pytest.mark.gpu
FORMATS = [(bits, group, curved) for bits, group in combinations((8, 4, 3, 2), (128, 64, 32))
           for curved in ((True, False) if bits == 3 else (True,))]  # fmt: skip
# Rows, columns, tokens: whole tiles; ends of rows, of groups and of tiles; parts of a row
SHAPES = [
    (256, 512, 33),
    (200, 448, 5),
    (130, 96, 1),
    (1000, 1000, 200),
    (512, 14336, 16),
    (384, 4096, 600),
    (300, 2048, 8),
    (130, 1152, 2),
    (4096, 512, 13),
    (1, 256, 40),
    (2, 512, 20),
    (33, 448, 3),
    (33, 448, 65),
]


def weight(bits: int, group: int, curved: bool, rows: int, columns: int, dtype: torch.dtype):
    """A packed weight with a scale of zero and negative ones."""
    torch.manual_seed(bits + group)
    w = torch.randn(rows, columns, device="cuda") / columns**0.5
    packed, scale = quantize(w, bits, dtype, group, curved=curved)
    scale[-1] *= -1
    if rows > 1:
        scale[0] = 0.0
    return packed, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits, group, curved", FORMATS)
def test_fused_products(bits: int, group: int, curved: bool, dtype: torch.dtype) -> None:
    """The kernel that unpacks on the way gives what the dense weight gives in float32."""
    if not launch.has_wgmma(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU, or a Triton without Gluon")
    for rows, columns, tokens in SHAPES:
        packed, scale = weight(bits, group, curved, rows, columns, dtype)
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        bias = torch.randn(rows, device="cuda").to(dtype) if tokens % 2 else None
        dense = dequantize(packed, scale, bits, columns, torch.float32, group, curved)
        expected = torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float())
        form = {"bits": bits, "group": group, "curved": curved}
        for found in (
            launch.fused_product(x, packed, scale, bias, **form),
            *[launch.product(x, packed, scale, bias, None, None, *form.values()) for _ in range(3)],
        ):
            error = (found.float() - expected).norm() / expected.norm()
            assert error <= TOLERANCES[dtype], (rows, columns, tokens)


@pytest.mark.parametrize("ranks", [1, 16, 40, 64])
@pytest.mark.parametrize("bits, group, curved", FORMATS)
def test_corrected_products(bits: int, group: int, curved: bool, ranks: int) -> None:
    """The same with a correction: by the kernel's last product, whatever the rank."""
    if not launch.has_wgmma(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU, or a Triton without Gluon")
    dtype = torch.bfloat16
    for rows, columns, tokens in SHAPES:
        packed, scale = weight(bits, group, curved, rows, columns, dtype)
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        u = torch.randn(rows, ranks, device="cuda").to(dtype)
        v = (torch.randn(ranks, columns, device="cuda") / columns**0.5).to(dtype)
        dense = dequantize(packed, scale, bits, columns, torch.float32, group, curved)
        expected = x.float() @ dense.T + x.float() @ v.float().T @ u.float().T
        form = {"bits": bits, "group": group, "curved": curved}
        for found in (
            launch.fused_product(x, packed, scale, None, u, v, **form),
            *[launch.product(x, packed, scale, None, u, v, *form.values()) for _ in range(3)],
        ):
            error = (found.float() - expected).norm() / expected.norm()
            assert error <= TOLERANCES[dtype], (rows, columns, tokens)


def test_a_corrected_layer() -> None:
    """A layer of few bits with low rank gives the same by one operator, after a change of its factors
    too, in a CUDA graph, and with gradients."""
    base, low = QuantizedSpec(DenseSpec(512, 384), 2, 128), LowRankSpec(512, 384, 16)
    layer = layer_of(CorrectedSpec(base, low), True).to("cuda", torch.bfloat16)
    w = torch.randn(384, 512, device="cuda") / 512**0.5
    layer.base.weight_q, layer.base.weight_scale = quantize(w, 2, torch.bfloat16)
    x = torch.randn(7, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        dense = layer.composed().float()
        expected = torch.nn.functional.linear(x.float(), dense, layer.bias.float())
        with torch.no_grad():
            found = [layer(x)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = layer(x)
            graph.replay()
            layer.correction.U.mul_(0.5)
        layer.correction.U.grad = None
        for y in (*found, again):
            error = (y.float() - expected).norm() / expected.norm()
            assert error <= TOLERANCES[torch.bfloat16]
    layer(x).sum().backward()
    assert layer.correction.U.grad is not None and layer.correction.U.grad.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite(bad: float) -> None:
    """A scale or an input that is not finite spoils the same outputs as through the dense weight."""
    packed, scale = weight(4, 128, True, 64, 256, torch.bfloat16)
    scale[2, 1] = bad
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    x[1, 5] = bad
    dense = dequantize(packed, scale, 4, 256, torch.bfloat16, 128)
    found, expected = packed_linear(x, packed, scale, None, 4, 128), x @ dense.T
    assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits, group, curved", FORMATS)
def test_one_token_that_is_not_finite(bits: int, group: int, curved: bool, bad: float) -> None:
    """NaN and infinities, with their signs, are where the dense weight in float32 gives them."""
    for rows, columns in ((130, 96), (33, 448), (1, 256), (4096, 4096), (512, 14336), (4096, 2048)):
        packed, scale = weight(bits, group, curved, rows, columns, torch.bfloat16)
        dense = dequantize(packed, scale, bits, columns, torch.float32, group, curved)
        x = torch.randn(1, columns, device="cuda").bfloat16()
        for place in (5, 5, columns - 1):
            x[0, place] = bad
            found = packed_linear(x, packed, scale, None, bits, group, curved).float()
            expected = (dense * x.float()).sum(1)[None]
            assert torch.equal(found.isnan(), expected.isnan()), (rows, columns)
            infinite = expected.isinf()
            assert torch.equal(found[infinite], expected[infinite]), (rows, columns)


def test_in_a_graph_and_by_the_compiler() -> None:
    """Replays of a CUDA graph and a compiled call give what an eager call gives, parts of rows too."""
    packed, scale = weight(2, 64, True, 320, 8192, torch.bfloat16)
    x = torch.randn(9, 8192, device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return packed_linear(x, packed, scale, None, 2, 64)

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(), expected)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_few_tokens_beside_each_other(bits: int) -> None:
    """Products on two streams and of two graphs at once do not count each other's programs."""
    if not launch.has_wgmma(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU, or a Triton without Gluon")
    packed, scale = weight(bits, 128, True, 4096, 4096, torch.bfloat16)
    x = torch.randn(8, 4096, device="cuda").bfloat16()
    run = lambda: launch.product(x, packed, scale, None, None, None, bits, 128, True)  # noqa: E731
    expected, streams, graphs = run(), [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for _ in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            made = [run() for _ in range(20)]
        graphs.append((graph, made))
    for stream, (graph, made) in zip(streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
            made += [run() for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(found, expected) for _, made in graphs for found in made)


@pytest.mark.parametrize("tokens", [2, 12])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_few_tokens_that_are_not_finite(bits: int, tokens: int) -> None:
    """NaN and infinities in one token give what a dense weight gives, and do not reach others."""
    if not launch.has_wgmma(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU, or a Triton without Gluon")
    packed, scale = weight(bits, 128, True, 4096, 1024, torch.bfloat16)
    dense = dequantize(packed, scale, bits, 1024, torch.bfloat16, 128)
    x = torch.randn(tokens, 1024, device="cuda").bfloat16()
    x[0, 7], x[1, 9], x[1, 700] = float("nan"), float("inf"), float("-inf")
    found = launch.product(x, packed, scale, None, None, None, bits, 128, True)
    expected = torch.nn.functional.linear(x.float(), dense.float())
    torch.testing.assert_close(found.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(found[infinite].float(), expected[infinite])
    assert torch.isfinite(found[2:]).all()


@pytest.mark.parametrize("bits, group", combinations((8, 4, 3, 2), (128, 32)))
def test_low_rank_in_few_bits(bits: int, group: int) -> None:
    """Both factors are multiplied as they are packed, forward and backward."""
    dtype = torch.bfloat16
    for rows, columns, rank, tokens in [(512, 384, 128, 1), (300, 1000, 96, 8), (130, 512, 60, 300)]:
        spec = QuantizedSpec(LowRankSpec(columns, rows, rank), bits=bits, group=group)
        layer = layer_of(spec, False).to("cuda", dtype)
        for name, shape in {"U": (rows, rank), "V": (rank, columns)}.items():
            made = quantize(torch.randn(shape, device="cuda"), bits, dtype, group)
            for kept, value in zip(layer.stored(layer.held[name]), made, strict=True):
                kept.data.copy_(value)
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype, requires_grad=True)
        u, v = (layer.packed(name).dequantized().float() for name in "UV")
        expected, up = x.float() @ v.T @ u.T, torch.randn(tokens, rows, device="cuda")
        with torch.no_grad():
            assert packed_product(layer, ("V", "U"), x, None) is not None
        found = layer(x)
        assert (found.float() - expected).norm() <= TOLERANCES[dtype] * expected.norm()
        (gradient,) = torch.autograd.grad(found, x, up.to(dtype))
        right = up @ u @ v
        assert (gradient.float() - right).norm() <= 2 * TOLERANCES[dtype] * right.norm()
