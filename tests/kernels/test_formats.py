"""Every format of packed weights: levels pack and unpack, and lie where the format says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.kernels.decode.quantized.formats import BITS as ALL_BITS
from blr.kernels.decode.quantized.formats import GROUPS, packed_width
from blr.kernels.decode.quantized.reference import (
    dequantize,
    levels_of,
    pack,
    quantize,
    unpack,
    values_of,
)


@settings(max_examples=80)
@given(
    st.sampled_from([*((bits, True) for bits in ALL_BITS), (3, False)]),
    *(st.sampled_from(GROUPS), st.integers(1, 400), st.integers(0, 2**31)),
)
def test_every_format_packs_its_levels(form: tuple[int, bool], group: int, K: int, seed: int) -> None:
    bits, curved = form
    generator = torch.Generator().manual_seed(seed)
    top, width = 2 ** (bits - 1), -(-K // group) * group
    levels = torch.randint(-top, top, (2, 3, width), dtype=torch.int8, generator=generator)
    packed = pack(levels, bits, group)
    assert packed.shape == (2, 3, packed_width(K, bits, group))
    assert torch.equal(unpack(packed, bits, group), levels)
    w = torch.randn(3, K, generator=generator)
    found, scale = quantize(w, bits, torch.bfloat16, group, curved=curved)
    wide = scale.float().repeat_interleave(group, -1)[:, :K]
    nearest = values_of(levels_of(w, wide, bits, curved), wide, bits, curved)
    assert torch.equal(dequantize(found, scale, bits, K, torch.float32, group, curved), nearest)


@pytest.mark.parametrize(("bits", "plane"), [(2, 0), (3, 0), (3, 32), (4, 0)])
def test_bytes_of_a_group_are_words_of_fields(bits: int, plane: int) -> None:
    """Field f of word j holds element f·W + j: checked on the words, not by `unpack`."""
    width = 1 if plane else {2: 2, 3: 2, 4: 4}[bits]
    count = 128 * width // 32
    for element in (0, 5, 77, 127):
        levels = torch.full((1, 128), -(2 ** (bits - 1)), dtype=torch.int8)
        levels[0, element] = 2 ** (bits - 1) - 1
        words = pack(levels, bits)[0, plane : plane + 4 * count].view(torch.int32)
        field, word = divmod(element, count)
        expected = torch.zeros(count, dtype=torch.int64)
        expected[word] = (2**width - 1) << field * width
        assert torch.equal(words.long() & 0xFFFFFFFF, expected)


def test_the_uniform_grid_of_three_bits_is_that_of_integers() -> None:
    """Levels from -4 to 3 with a signed scale: weights that lie there come back as they were."""
    w = torch.arange(-4.0, 4.0).repeat(2, 4) * torch.tensor([[0.5], [-2.0]])
    packed, scale = quantize(w, 3, group=32, curved=False)
    assert torch.equal(scale.flatten(), torch.tensor([0.5, -2.0]))
    assert torch.equal(dequantize(packed, scale, 3, 32, torch.float32, 32, curved=False), w)
