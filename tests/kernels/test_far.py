"""Offsets of more than 32 bits: what lies far apart is read and written where it is."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blr.kernels.decode.gemm.launch import bmm
from blr.kernels.fp8.triton import mix_kernel
from blr.kernels.layers.blast.triton import mix_fma_kernel

NORESERVE = 0x4000  # Linux's; Python names it from 3.13 on
FAR = 160_000_000  # numbers from one block to the next; sixteen are beyond 2^31


@pytest.fixture
def far() -> Iterator[Tensor]:
    """[2^32] in half precision, of which only what is written takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    held = mmap.mmap(-1, 2 * 16 * FAR, flags=flags)
    yield torch.frombuffer(held, dtype=torch.float16)


def test_blocks_of_float8(far: Tensor) -> None:
    blocks, tokens, rank = 16, 4, 8
    z = far.as_strided((blocks, tokens, rank), (FAR, rank, 1)).copy_(torch.randn(blocks, tokens, rank))
    s, w = torch.randn(blocks, blocks, rank), torch.empty(blocks, tokens, rank)
    sizes = (tokens, rank, FAR, rank, w.stride(0), w.stride(1))
    mix_kernel[(1, 1)](z, s, w, *sizes, BLOCKS=16, WIDTH=16, TOKENS=4, RANKS=8)
    torch.testing.assert_close(w, torch.einsum("klr,lnr->knr", s, z.float()))


def test_blocks_mixed_in_place(far: Tensor) -> None:
    blocks, rank, tokens, apart = 8, 2, 8, 2 * FAR
    z = far.as_strided((blocks, rank, tokens), (apart, tokens, 1))
    z.copy_(torch.randn(blocks, rank, tokens))
    s = torch.randn(blocks, blocks, rank)
    expected = torch.einsum("klr,lrn->krn", s, z.float()).half()
    sizes = (tokens, apart, tokens, *s.stride(), apart, tokens)
    mix_fma_kernel[(1, rank)](z, s, z, *sizes, B=blocks, OUT=blocks, BN=8)
    torch.testing.assert_close(z, expected)


def test_products_of_batches() -> None:
    """A batch lands 2^31 elements into its tensor; the memory between batches is never touched."""
    a, b = torch.randn(3, 3, 4).half(), torch.randn(3, 4, 5).half()
    apart = torch.empty_strided((3, 3, 5), (2**30 + 7, 5, 1), dtype=torch.float16)
    assert torch.equal(bmm(a, b, apart), bmm(a, b, torch.empty(3, 3, 5, dtype=torch.float16)))
