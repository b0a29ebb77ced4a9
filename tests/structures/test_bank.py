"""Banks: many rounded parameters trained as each alone is, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blr.compressor.structures import latent as bank
from blr.compressor.structures.latent import Banks, GroupPlace, Latent, Plain, RoundedGrid, Trained

TURNED = GroupPlace(lambda t: t.mT, lambda t: t.mT)


def _trained() -> list[Trained]:
    """Three grids, one of them of two parameters, one padded and turned."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(6, 12, generator=generator)) for _ in range(5)]
    two, three = RoundedGrid(2, 8), RoundedGrid(3, 8)
    latents = [Latent(made[0], two), Latent(made[1], two, TURNED), Latent(made[2], three)]
    plain = [Plain(made[4]), Plain(nn.Parameter(made[4].detach().bfloat16()), made[4].detach().clone())]
    return [*latents, Latent(made[3], RoundedGrid(4, 4, torch.float32)), *plain]


def _step(trained: list[Trained], seed: int, without: int | None = None) -> None:
    """A gradient to every parameter but one."""
    generator = torch.Generator().manual_seed(seed)
    for n, part in enumerate(trained):
        gradient = torch.randn(part.parameter.shape, generator=generator).to(part.parameter.dtype)
        part.parameter.grad = None if n == without else gradient


def _moved(trained: list[Trained]) -> None:
    for part in trained:
        for master, _ in part.masters:
            master.data.sub_(0.1 * master.grad)
            master.grad = None


@pytest.mark.parametrize(("most", "sizes"), [(10**6, [2, 1, 1]), (100, [1, 1, 1, 1])])
def test_banks_do_what_their_parts_do(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of two micro-batches, in one of which a parameter has no gradient."""
    monkeypatch.setattr(bank, "MOST", most)
    alone, together = _trained(), _trained()
    each, banks = [Banks([part]) for part in alone], Banks(together)
    assert [len(found.latents) for found in banks.banks] == sizes
    for seed in range(3):
        for part in (*each, banks):
            part.publish()
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.parameter, other.parameter)
        for without in (None, seed):
            _step(alone, seed, without)
            _step(together, seed, without)
            for part in (*each, banks):
                part.collect()
        _moved(alone)
        _moved(together)
    for one, other in zip(alone, together, strict=True):
        for (master, _), (same, _) in zip(one.masters, other.masters, strict=True):
            assert torch.equal(master, same)
