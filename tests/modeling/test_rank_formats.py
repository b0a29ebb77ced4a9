"""What a cache of ranks holds them in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import TOLERANCES

from blr.compressor.modeling.rank_cache import FORMATS, LARGEST
from blr.compressor.structures.cached import KV_CACHES, held_bytes, leading


@given(rank=st.integers(1, 70), groups=st.integers(0, 3), seed=st.integers(0, 99))
def test_int4_is_off_by_half_a_step_of_each_part(rank: int, groups: int, seed: int) -> None:
    """Leading ranks by a step of int8, the others of int4, each of its token's own size; zeros stay."""
    shape = (2, 3, groups, rank) if groups else (2, 3, rank)
    ranks = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    ranks[0, 0] = 0
    parts = FORMATS["int4"].pack(ranks)
    found = FORMATS["int4"].unpack(parts, torch.float32)
    assert found.shape == ranks.shape and not found[0, 0].any()
    for part, kind in ((slice(0, leading(rank)), "int8"), (slice(leading(rank), rank), "int4")):
        if ranks[..., part].shape[-1]:
            most = ranks[..., part].abs().amax(-1, keepdim=True)
            step = most / LARGEST[kind] / 2 + TOLERANCES[torch.float32] * most
            assert ((found - ranks)[..., part].abs() <= step).all()


@pytest.mark.parametrize("kind", KV_CACHES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 31, 32])
def test_sizes_are_those_that_are_said(rank: int, kind: str) -> None:
    """Beside int4 a quarter of the ranks, or up to two more, are in int8."""
    assert rank / 4 <= leading(rank) <= rank / 4 + 2 and (rank - leading(rank)) % 2 == 0
    parts = FORMATS[kind].pack(torch.ones(1, 5, rank, dtype=torch.bfloat16))
    assert sum(part.nbytes for part in parts) == 5 * held_bytes(rank, kind, 2)
    assert held_bytes(32, "int4", 2) == 8 + 12 + 2 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_half_precision_is_rounded_as_well(kind: str, dtype: torch.dtype) -> None:
    """The largest rank, too, whose level half precision would round to one that int8 has not."""
    ranks = torch.randn(500, 1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = FORMATS[kind].unpack(FORMATS[kind].pack(ranks), dtype)
    most = ranks.abs().amax(-1, keepdim=True).float()
    missed = (found.float() - ranks.float()).abs()
    assert bool((missed <= most * (0.5 / LARGEST[kind] + 2 * torch.finfo(dtype).eps)).all())
