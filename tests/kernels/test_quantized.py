"""Quantized weights: packing loses nothing but what rounding to levels must, and the fused stages
compute what their dequantized weights do. Interpreter and compiler only: needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv import segments
from blr.kernels.decode.gemv.segments import How, Segment
from blr.kernels.decode.quantized.formats import packed_width
from blr.kernels.decode.quantized.reference import (
    dequantize,
    pack,
    quantize,
    unpack,
)

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
BITS = pytest.mark.parametrize("bits", [8, 4], ids=["int8", "int4"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
TOKENS = pytest.mark.parametrize("tokens", [1, 2, 3, 8])
# (blocks, rows, columns, part): the stages of every structure; columns below, at, and ragged above a
# group of 128.
STAGES = {
    "dense": (1, 19, 200, None),
    "lowrank-V": (1, 5, 300, None),
    "grouped-U": (4, 6, 33, None),
    "monarch-V": (3, 12, 128, 4),
    "blast-U": (3, 7, 150, None),
}
STAGE = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)


@settings(max_examples=60)
@given(st.sampled_from([4, 8]), st.integers(1, 3), st.integers(1, 300), st.integers(0, 2**31))
def test_pack_and_unpack_are_inverse(bits: int, rows: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    top, width = 2 ** (bits - 1), -(-groups // 128) * 128
    levels = torch.randint(-top, top, (2, rows, width), dtype=torch.int8, generator=generator)
    packed = pack(levels, bits)
    assert packed.shape == (2, rows, packed_width(width, bits))
    assert torch.equal(unpack(packed, bits), levels)


@settings(max_examples=60)
@given(
    st.sampled_from([4, 8]),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.floats(-4, 3),
    st.integers(0, 2**31),
)
def test_every_weight_is_near_its_level(
    bits: int, K: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    """int8 moves a weight by half a level at most, and int4 a group by no more than plain rounding."""
    w = torch.randn(3, K, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    packed, scale = quantize(w, bits, dtype)
    groups = torch.nn.functional.pad(w, (0, -K % 128)).unflatten(-1, (-1, 128))
    back = dequantize(packed, scale, bits, scale.shape[-1] * 128, torch.float32).unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1)
    if bits == 8:
        slack = 2 * torch.finfo(dtype).eps * largest + 254 * torch.finfo(dtype).smallest_normal
        assert bool(((groups - back).abs().amax(-1) <= largest / 254 + slack).all())
    else:
        step = (largest / 7).to(dtype).float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        plain = (groups / step).round().clamp(-8, 7) * step
        chosen, usual = ((groups - b).square().sum(-1) for b in (back, plain))
        assert bool((chosen <= usual * (1 + 1e-5)).all())
    assert not back.flatten(-2)[:, K:].any()  # padding stays zero


@BITS
def test_search_of_int4_scales_beats_the_largest_magnitude(bits: int) -> None:
    """Gaussian weights: 9.5% for the search, 11.6% for absmax/7; int8 0.65% either way."""
    torch.manual_seed(0)
    w = torch.randn(64, 1024)
    error = float((dequantize(*quantize(w, bits), bits, 1024, w.dtype) - w).norm() / w.norm())
    assert error < {8: 0.0075, 4: 0.10}[bits]


@BITS
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 130), (3, 1)])
def test_empty_and_constant_weights(bits: int, shape: tuple[int, ...]) -> None:
    for w in (torch.zeros(shape), torch.full(shape, -2.5)):
        packed, scale = quantize(w, bits)
        assert packed.shape == (*shape[:-1], packed_width(shape[-1], bits))
        torch.testing.assert_close(dequantize(packed, scale, bits, shape[-1], w.dtype), w)


def test_other_bits_are_refused() -> None:
    for bits, group in ((5, 128), (4, 16)):
        with pytest.raises(ValueError, match=r"expected (8, 4, 3 or 2|128, 64 or 32)"):
            quantize(torch.zeros(2, 2), bits, group=group)


def _stage(
    stage: tuple[Any, ...], bits: int, tokens: int, dtype: torch.dtype, norm: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and epilogue of one stage with random numbers."""
    blocks, rows, K, part = stage
    torch.manual_seed(0)
    packed, scale = quantize(torch.randn(blocks, rows, K) / K**0.5, bits, dtype)
    x = torch.randn(tokens, 2 * blocks * K).to(dtype)[:, : blocks * K]
    epilogue: dict[str, Any] = {
        "bias": torch.randn(blocks * rows).to(dtype),
        "residual": torch.randn(tokens, blocks * rows).to(dtype),
        "part": part,
    }
    if norm and blocks == 1:
        epilogue |= {"gain": torch.rand(K).to(dtype), "eps": 1e-5}
    return (x, packed, scale, bits, K), epilogue


def _expected(arguments: tuple[Any, ...], epilogue: dict[str, Any]) -> torch.Tensor:
    x, *rest = arguments
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in epilogue.items()}
    return dequantized(x.double(), *rest, **wide)


def dequantized(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    K: int,
    residual: Any = 0.0,
    gain: Any = None,
    eps: float = 0.0,
    **epilogue: Any,
) -> torch.Tensor:
    """A stage from its definition."""
    w = dequantize(packed, scale, bits, K, x.dtype)
    return Segment(x, w, x, **epilogue).product(gain, eps) + residual


def multiplied(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    K: int,
    *,
    bias: Any = None,
    part: Any = None,
    residual: Any = None,
    gain: Any = None,
    eps: float = 0.0,
    **config: int,
) -> torch.Tensor:
    """The same by kernels."""
    from blr.kernels.decode.quantized.launch import grouped

    y = torch.full((len(x), packed.shape[0] * packed.shape[1]), float("nan"), dtype=x.dtype)
    if residual is not None:
        y.copy_(residual)
    s = segments.QuantizedSegment(x, packed, scale, bits, K, y, bias, part=part)
    grouped([s], How(gain, eps, add=residual is not None), config)
    return y


def _near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return float((found.double() - expected).norm() / expected.norm()) < TOLERANCES[dtype]


@pytest.mark.sampled(4)
@needs_triton
@BITS
@DTYPES
@TOKENS
@STAGE
def test_stage_equals_its_dequantized_weights(
    stage: tuple[Any, ...], tokens: int, dtype: torch.dtype, bits: int
) -> None:
    arguments, epilogue = _stage(stage, bits, tokens, dtype, norm=tokens != 2)
    assert _near(multiplied(*arguments, **epilogue), _expected(arguments, epilogue), dtype)


@needs_triton
@BITS
@pytest.mark.parametrize("config", [{"BR": 1, "BQ": 8}, {"BR": 4, "BQ": 16}, {"BR": 16, "BQ": 64}])
@pytest.mark.parametrize("tokens", [1, 4])
def test_any_tile_gives_the_same(bits: int, config: dict[str, int], tokens: int) -> None:
    """Chunks that end inside, at, and far beyond a row, and rows that do not fill a tile."""
    arguments, epilogue = _stage((1, 19, 700, None), bits, tokens, torch.float32, norm=True)
    found = multiplied(*arguments, **epilogue, **config)
    assert _near(found, _expected(arguments, epilogue), torch.float32)


def _mixing(
    bits: int, tokens: int, dtype: torch.dtype, blocks: int = 3, ranks: int = 7, K: int = 150
) -> tuple[Any, ...]:
    """x, packed, scale, bits, K and S of the first stage of BLAST."""
    torch.manual_seed(0)
    packed, scale = quantize(torch.randn(blocks, ranks, K) / K**0.5, bits, dtype)
    x, s = torch.randn(tokens, blocks * K).to(dtype), torch.randn(blocks, blocks, ranks).to(dtype)
    return x, packed, scale, bits, K, s


@pytest.mark.sampled(3)
@needs_triton
@BITS
@DTYPES
@TOKENS
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_mixing_stage_equals_its_dequantized_weights(
    norm: bool, tokens: int, dtype: torch.dtype, bits: int
) -> None:
    from blr.kernels.decode.quantized.launch import grouped

    x, packed, scale, _, K, s = _mixing(bits, tokens, dtype)
    gain = torch.rand(x.shape[1]).to(dtype) if norm else None
    out = torch.full((tokens, 21), float("nan"), dtype=dtype)
    stage = segments.QuantizedSegment(x, packed, scale, bits, K, out, mix=s)
    grouped([stage], How(gain, 1e-5))
    assert _near(out, replace(stage, x=x.double()).product(gain, 1e-5), dtype)


@needs_triton
@BITS
@pytest.mark.parametrize("config", [{"BR": 1, "BQ": 8}, {"BR": 2, "BQ": 32}])
def test_mixing_stage_with_any_tile(bits: int, config: dict[str, int]) -> None:
    """Blocks that fill no power of two, chunks that end inside and beyond a row."""
    from blr.kernels.decode.quantized.launch import grouped

    x, packed, scale, _, K, s = _mixing(bits, 2, torch.float32, blocks=6, ranks=5, K=300)
    stage = segments.QuantizedSegment(x, packed, scale, bits, K, torch.empty(2, 30), mix=s)
    grouped([stage], config=config)
    assert _near(stage.y, replace(stage, x=x.double()).product(None, 0.0), torch.float32)


@needs_triton
@BITS
def test_slices_of_packed_weights_need_no_copy(bits: int) -> None:
    """Rows of a larger packed tensor, as V of q|k|v in one, at an offset."""
    from blr.kernels.decode.quantized.launch import as_words

    (x, packed, scale, _, K), _ = _stage((1, 24, 200, None), bits, 1, torch.float32, norm=False)
    part, part_scale = packed[:, 8:20], scale[:, 8:20]
    assert as_words(part, bits, K).data_ptr() == part.data_ptr()
    expected = dequantized(x.double(), part, part_scale, bits, K)
    assert _near(multiplied(x, part, part_scale, bits, K), expected, torch.float32)


@needs_triton
def test_a_wrong_width_is_refused() -> None:
    packed, scale = quantize(torch.randn(1, 4, 200), 4)
    with pytest.raises(ValueError, match="expected 256 for 200 columns of int8"):
        multiplied(torch.zeros(1, 200), packed, scale, 8, 200)


def _segments(bits: int, tokens: int, stages: list[tuple[Any, ...]]) -> list[segments.QuantizedSegment]:
    made = []
    for stage in stages:
        (x, packed, scale, _, K), epilogue = _stage(stage, bits, tokens, torch.float32, norm=False)
        y = torch.full((tokens, stage[0] * stage[1]), float("nan"))
        kept = {name: epilogue.get(name) for name in ("bias", "part")}
        made.append(segments.QuantizedSegment(x, packed, scale, bits, K, y, **kept))
    return made


def _mixing_segment(bits: int, tokens: int) -> segments.QuantizedSegment:
    x, packed, scale, _, K, s = _mixing(bits, tokens, torch.float32)
    y = torch.full((tokens, 21), float("nan"))
    return segments.QuantizedSegment(x, packed, scale, bits, K, y, mix=s)


def _against_reference(
    kernel: Callable[..., None], plain: Callable[..., None], made: list[segments.QuantizedSegment]
) -> None:
    kernel()
    found = [s.y.clone() for s in made]
    for s in made:
        s.y.fill_(float("nan"))
    plain()
    for y, s in zip(found, made, strict=True):
        if not s.y.isnan().all():  # a dual writes only its second segment
            assert _near(y, s.y.double(), torch.float32)


@needs_triton
@BITS
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_stages_in_one_launch(bits: int, tokens: int, count: int) -> None:
    from blr.kernels.decode.quantized.launch import grouped

    made = _segments(bits, tokens, [STAGES[name] for name in ("dense", "monarch-V")])
    made.insert(1, _mixing_segment(bits, tokens))
    made = made[:count]
    _against_reference(lambda: grouped(made), lambda: segments.grouped(made), made)


@needs_triton
@BITS
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_norm_is_over_the_inputs_of_all_blocks(bits: int, tokens: int) -> None:
    """The first stage of Monarch splits its input among blocks; the norm before it does not."""
    from blr.kernels.decode.quantized.launch import grouped

    made = [*_segments(bits, tokens, [STAGES["monarch-V"]]), _mixing_segment(bits, tokens)]
    for s in made:
        options = {"gain": torch.rand(s.x.shape[1]), "eps": 1e-5}
        s.x[:, : s.K].mul_(5)  # blocks of different size
        _against_reference(
            lambda s=s, o=options: grouped([s], How(**o)),
            lambda s=s, o=options: segments.grouped([s], **o),
            [s],
        )


@needs_triton
@BITS
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_gated_pair_in_one_launch(bits: int, tokens: int) -> None:
    from blr.kernels.decode.quantized.launch import grouped

    gain = torch.rand(200)
    made = _segments(bits, tokens, [(1, 19, 200, None)] * 2)
    options = {"activation": "silu", "gain": gain, "eps": 1e-5}
    _against_reference(
        lambda: grouped(made, How(**options)), lambda: segments.dual(*made, **options), made
    )
    assert not made[1].y.isnan().any()


@needs_triton
@BITS
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("widths", [(400, 30), (30, 400)], ids=["wide-gate", "wide-up"])
def test_gated_pair_of_different_ranks(bits: int, tokens: int, widths: tuple[int, int]) -> None:
    """Several blocks; a rank far below the other's; more chunks than one; a bias on one side only."""
    from blr.kernels.decode.quantized.launch import grouped

    made = _segments(bits, tokens, [(2, 5, width, None) for width in widths])
    made[0] = replace(made[0], bias=None)
    _against_reference(
        lambda: grouped(made, How(activation="gelu_tanh"), {"BQ": 8}),
        lambda: segments.dual(*made, activation="gelu_tanh"),
        made,
    )
    assert not made[1].y.isnan().any()


@pytest.mark.sampled(4)
@needs_triton
@BITS
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_rounding_of_the_offsets_stays_small(bits: int, tokens: int, dtype: torch.dtype) -> None:
    """Numbers carry offsets of up to 70 levels, which are taken from the sums of quads only: inputs of
    one sign make those sums large. With float32 scales nothing is lost, with float16 scales a hundredth
    of what they may lose."""
    torch.manual_seed(0)
    packed, scale = quantize(torch.randn(1, 32, 1024) / 32, bits, dtype)
    for x in (torch.randn(tokens, 1024), torch.rand(tokens, 1024) + 1):
        found = multiplied(x, packed, scale, bits, 1024).double()
        expected = dequantized(x.double(), packed, scale, bits, 1024)
        allowed = TOLERANCES[dtype] / (1 if dtype == torch.float32 else 100)
        assert float((found - expected).norm() / expected.norm()) < allowed


@needs_triton
def test_dense_and_quantized_stages_side_by_side() -> None:
    """One list of segments of three kinds, and a stage of each kind added to its result."""
    from blr.kernels.decode import choice

    int4 = _segments(4, 1, [STAGES["dense"], STAGES["blast-U"]])
    (int8,) = _segments(8, 1, [STAGES["monarch-V"]])
    made = [int4[0].dense(), int4[1], int8]
    _against_reference(lambda: choice.grouped(made), lambda: segments.grouped(made), made)
    for s in made:
        s.y.fill_(1)
    choice.grouped(made, How(add=True))
    for s in made:
        assert _near(s.y, 1 + s.product(None, 0.0).double(), torch.float32)
