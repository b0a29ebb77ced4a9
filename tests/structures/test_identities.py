"""The families contain each other: the same weights through two of them give the same layer."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.structures import blast, lowrank, monarch
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, MonarchSpec

pytestmark = pytest.mark.fast


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize(("o", "i", "b", "r"), [(12, 18, 3, 4), (16, 16, 4, 5), (6, 10, 2, 7)])
def test_low_rank_is_blast_with_unit_couplings(o: int, i: int, b: int, r: int) -> None:
    U, V = drawn(o, r), drawn(i, r)
    dense = lowrank.reconstruct({"U": U, "V": V}, LowRankSpec(i, o, r))
    factors = {"U": U.unflatten(0, (b, -1)), "S": U.new_ones(b, b, r), "V": V.unflatten(0, (b, -1))}
    torch.testing.assert_close(blast.reconstruct(factors, BlastSpec(i, o, b, r)), dense)


@pytest.mark.parametrize(("o", "i", "b", "s"), [(12, 18, 3, 2), (8, 16, 4, 1)])
def test_monarch_is_blast_with_couplings_that_select_a_block(o: int, i: int, b: int, s: int) -> None:
    spec = MonarchSpec(i, o, b, s)
    U, V = drawn(*spec.shapes()["U"]), drawn(*spec.shapes()["V"])
    rank = b * b * s  # one group of s ranks for every block (k, l)
    S = torch.zeros(b, b, b, b, s, dtype=U.dtype)
    wide_u = torch.zeros(b, o // b, b, b, s, dtype=U.dtype)
    wide_v = torch.zeros(b, i // b, b, b, s, dtype=U.dtype)
    for k in range(b):
        wide_u[k, :, k] = U[k].unflatten(-1, (b, s))
        wide_v[k, :, :, k] = V[k].unflatten(-1, (b, s))
        for other in range(b):
            S[k, other, k, other] = 1
    factors = {"U": wide_u.flatten(2), "S": S.flatten(2), "V": wide_v.flatten(2)}
    found = blast.reconstruct(factors, BlastSpec(i, o, b, rank))
    torch.testing.assert_close(found, monarch.reconstruct({"U": U, "V": V}, spec))


def test_one_block_of_every_family_is_low_rank() -> None:
    U, V = drawn(10, 3), drawn(14, 3)
    dense = lowrank.reconstruct({"U": U, "V": V}, LowRankSpec(14, 10, 3))
    one = {"U": U[None], "V": V[None]}
    torch.testing.assert_close(monarch.reconstruct(one, MonarchSpec(14, 10, 1, 3)), dense)
    factors = {**one, "S": U.new_ones(1, 1, 3)}
    torch.testing.assert_close(blast.reconstruct(factors, BlastSpec(14, 10, 1, 3)), dense)
