"""Banks: many rounded parameters trained as each alone is, to the last bit."""

from __future__ import annotations

import torch
from torch import nn

from blr.compressor.rounding.bank import Banks
from blr.compressor.rounding.latent import Latent, Place, Plain, Trained

TURNED = Place(lambda t: t.mT, lambda t: t.mT)


def _trained() -> list[Trained]:
    """Three grids, one of them of two parameters, one padded and turned."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(6, 12, generator=generator)) for _ in range(5)]
    latents = [Latent(made[0], 2, 8), Latent(made[1], 2, 8, TURNED), Latent(made[2], 3, 8)]
    return [*latents, Latent(made[3], 4, 4, scale_dtype=torch.float32), Plain(made[4])]


def _step(trained: list[Trained], seed: int) -> None:
    """A gradient to every parameter."""
    generator = torch.Generator().manual_seed(seed)
    for part in trained:
        part.parameter.grad = torch.randn(part.parameter.shape, generator=generator)


def _moved(trained: list[Trained]) -> None:
    for part in trained:
        for master, _ in part.masters:
            master.data.sub_(0.1 * master.grad)
            master.grad = None


def test_banks_do_what_their_parts_do() -> None:
    alone, together = _trained(), _trained()
    banks = Banks(together)
    assert [len(bank.latents) for bank in banks.banks] == [2, 1, 1]
    for seed in range(3):
        for part in alone:
            part.publish()
        banks.publish()
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.parameter, other.parameter)
        _step(alone, seed)
        _step(together, seed)
        for part in alone:
            part.collect()
        banks.collect()
        _moved(alone)
        _moved(together)
    for one, other in zip(alone, together, strict=True):
        for (master, _), (same, _) in zip(one.masters, other.masters, strict=True):
            assert torch.equal(master, same)
