"""Balancing factors changes no product and leaves the parts that are multiplied equally large."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.structures.balance import balanced
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec, LowRankSpec, MonarchSpec, Spec

SPECS: dict[str, Spec] = {
    "svd": LowRankSpec(12, 8, 3),
    "svd-rows": LowRankSpec(12, 8, 2, groups=2, side="out"),
    "svd-columns": LowRankSpec(12, 8, 2, groups=2, side="in"),
    "monarch": MonarchSpec(12, 8, blocks=4, block_rank=2),
    "blast": BlastSpec(12, 8, blocks=4, rank=3),
    "ks": KroneckerSpec(12, 8, patterns=((1, 4, 6, 2), (2, 6, 4, 1), (1, 8, 12, 1))),
}


def lopsided(spec: Spec) -> dict[str, torch.Tensor]:
    """Factors of very different sizes, some component of one of them zero."""
    torch.manual_seed(0)
    found = {n: torch.randn(s, dtype=torch.float64) for n, s in spec.shapes().items()}
    first = next(iter(found))
    found[first] *= 100 * torch.rand(found[first].shape[-1], dtype=torch.float64)
    found[first].select(-1, 0).zero_()
    return found


@pytest.mark.parametrize("name", SPECS)
def test_the_product_stays_and_sizes_are_even(name: str) -> None:
    spec, factors = SPECS[name], lopsided(SPECS[name])
    found = balanced(factors, spec)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in factors.items()}
    reconstruct = STRUCTURES[spec.structure].factorizer().reconstruct
    torch.testing.assert_close(reconstruct(found, spec), reconstruct(factors, spec))
    sizes = [float(t.square().sum().sqrt()) for t in found.values()]
    before = [float(t.square().sum().sqrt()) for t in factors.values()]
    assert max(sizes) / min(sizes) < min(4.0, max(before) / min(before))


def test_each_component_of_low_rank_is_even() -> None:
    found = balanced(lopsided(SPECS["svd"]), SPECS["svd"])
    left, right = (found[name].norm(dim=0)[1:] for name in "UV")  # the first is zero on one side
    torch.testing.assert_close(left, right)


def test_the_columns_of_every_block_of_blast_are_even() -> None:
    found = balanced(lopsided(SPECS["blast"]), SPECS["blast"])
    for name in "UV":
        sizes = found[name].square().mean(1)[:, 1:]
        torch.testing.assert_close(sizes, sizes[:1].expand_as(sizes))
