"""The paper's kernels ❶–❺ compute what the dense layer does.

Numbers come from Triton's interpreter: float32 and float16 (its bfloat16 dots are meaningless).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comparisons import fused_mix, product, staged, transposed
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.layers.blast.reference import blast_linear
from blr.kernels.layers.monarch.reference import monarch_linear

pytestmark = pytest.mark.usefixtures("poison")
DTYPES = [torch.float32, torch.float16]
TOKENS = [0, 1, 3, 17, 129]
# blocks, p, q, r: one block, few (padded to a power of two), tensor cores with and without padding
SHAPES = [(1, 7, 5, 9), (3, 5, 7, 11), (6, 3, 9, 5), (9, 5, 3, 7), (16, 5, 3, 17)]


def factors(blocks: int, p: int, q: int, r: int, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random x [n, b·p] (every other column of a wider tensor), U, S, V and bias."""
    torch.manual_seed(blocks * 1000 + n)
    return {
        "x": torch.randn(n, 2 * blocks * p).to(dtype)[:, ::2],
        "U": torch.randn(blocks, q, r).to(dtype),
        "S": torch.randn(blocks, blocks, r).to(dtype),
        "V": torch.randn(blocks, p, r).to(dtype),
        "bias": 5 * torch.randn(blocks * q).to(dtype),
    }


def check(found: Tensor, reference: Callable[..., Tensor], tensors: dict[str, Tensor]) -> None:
    """`found` is the reference's result in float64, within the tolerance of its dtype."""
    expected = reference(**{name: t.double() for name, t in tensors.items()})
    assert found.dtype == tensors["x"].dtype
    assert found.shape == expected.shape
    if found.numel():
        error = (found.double() - expected).norm() / expected.norm()
        assert float(error) < TOLERANCES[found.dtype]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", [fused_mix, transposed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blast_for_every_number_of_tokens(
    variant: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    for n in TOKENS:
        tensors = factors(*shape, n, dtype)
        check(variant(**tensors), blast_linear, tensors)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_monarch_for_every_number_of_tokens(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    blocks, p, q, inner = shape
    for n in TOKENS:
        tensors = factors(blocks, p, q, blocks * (inner % 5 + 1), n, dtype)
        del tensors["S"]
        check(staged(**tensors), monarch_linear, tensors)


@pytest.mark.parametrize("variant", [fused_mix, transposed, staged])
def test_factors_may_have_any_strides_and_no_bias(variant: Callable[..., Tensor]) -> None:
    tensors = factors(3, 5, 7, 9, 17, torch.float32)
    del tensors["bias"]
    if variant is staged:
        del tensors["S"]
    reference = monarch_linear if variant is staged else blast_linear
    for order in [(0, 2, 1), (1, 2, 0), (2, 0, 1)]:
        inverse = [order.index(axis) for axis in range(3)]
        stored = {
            name: t if name == "x" else t.permute(order).contiguous().permute(inverse)
            for name, t in tensors.items()
        }
        stored["x"] = tensors["x"].T.contiguous().T
        check(variant(**stored), reference, tensors)


SMALL = {"BM": 16, "BN": 32, "BK": 16, "GROUP": 3}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_sizes_change_nothing_but_time(dtype: torch.dtype) -> None:
    """Several tiles along every axis, several steps of p, several groups of output blocks."""
    tensors = factors(6, 21, 34, 37, 37, dtype)
    mix = {"BLOCK_B": 2, "BLOCK_N": 16, "BLOCK_R": 16, "BLOCK_P": 16, "GROUP": 2}
    check(fused_mix(**tensors, first=mix, second=SMALL), blast_linear, tensors)
    for middle in [{"BLOCK_R": 4, "BLOCK_N": 16}, {"BLOCK_B": 16, "BLOCK_R": 2, "BLOCK_N": 16}]:
        y = transposed(**tensors, first=SMALL, middle=middle, last=SMALL)
        check(y, blast_linear, tensors)
    monarch = {**factors(6, 21, 34, 36, 37, dtype)}
    del monarch["S"]
    check(staged(**monarch, first=SMALL, second=SMALL), monarch_linear, monarch)


@pytest.mark.parametrize("variant", [fused_mix, transposed, staged])
def test_chunks_of_tokens(variant: Callable[..., Tensor]) -> None:
    """A ragged last chunk reuses the buffers of the others and reads nothing they left."""
    tensors = factors(3, 5, 7, 9, 150, torch.float32)
    if variant is staged:
        del tensors["S"]
    check(variant(**tensors, chunk=64), monarch_linear if variant is staged else blast_linear, tensors)


def test_offsets_beyond_32_bits() -> None:
    """A batch 2^31 elements into its tensor, each factor of the offset below 2^31, lands there.

    The memory between batches is never touched.
    """
    a, b = torch.randn(3, 3, 4).half(), torch.randn(3, 4, 5).half()
    far = torch.empty_strided((3, 3, 5), (2**30 + 7, 5, 1), dtype=torch.float16)
    assert torch.equal(product(a, b, far), product(a, b, torch.empty(3, 3, 5, dtype=torch.float16)))
