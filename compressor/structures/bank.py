"""Many rounded parameters trained together: their masters lie in one buffer for each grid, so that a
step is a few kernels of a GPU, however many layers a block has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from blr.compressor.structures.latent import Latent, Plain, Trained, add_gradient, straight_through
from blr.kernels.decode.quantized.reference import levels_of, values_of

MOST = 1 << 26  # numbers of a bank: a step holds some forty bytes of each for a moment


class Bank:
    """Latents of one grid, as their `publish` and `collect` would do it one by one. From here on the
    masters of each are views of `latent` [n, G] and `scale` [n, 1]."""

    def __init__(self, latents: Sequence[Latent]) -> None:
        self.latents, self.bits, self.scale_dtype = latents, latents[0].bits, latents[0].scale_dtype
        self.curved = latents[0].curved
        self.latent = torch.cat([found.latent.flatten(0, -2) for found in latents])
        self.scale = torch.cat([found.scale.flatten(0, -2) for found in latents])
        self.sizes = [found.scale.numel() for found in latents]
        rows, scales = self._split(self.latent), self._split(self.scale)
        for found, row, scale in zip(latents, rows, scales, strict=True):
            found.latent, found.scale = row.view_as(found.latent), scale.view_as(found.scale)
        self.levels = self._levels()[0]

    def publish(self) -> None:
        """Give the parameters the rounded values of the masters."""
        self.levels, scale = self._levels()
        values = self._split(values_of(self.levels, scale, self.bits, self.curved))
        for found, value in zip(self.latents, values, strict=True):
            found.take(value.view_as(found.latent))

    def collect(self) -> None:
        """Add to the gradients of all masters those of the values published last."""
        if all(found.parameter.grad is None for found in self.latents):
            return
        rows = torch.cat([found.given().flatten(0, -2) for found in self.latents])
        scale = self.scale.to(self.scale_dtype).float()
        found = straight_through(self.latent, scale, self.levels, rows, self.bits, self.curved)
        for latent, gradient, of_scale in zip(self.latents, *map(self._split, found), strict=True):
            add_gradient(latent.latent, gradient.view_as(latent.latent))
            add_gradient(latent.scale, of_scale.view_as(latent.scale))

    def _levels(self) -> tuple[Tensor, Tensor]:
        scale = self.scale.to(self.scale_dtype).float()
        return levels_of(self.latent, scale, self.bits, self.curved), scale

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.sizes)


class Banks:
    """All that is `trained`: what is rounded in banks, copies of masters together, the rest alone."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        kinds: dict[tuple[int, int, bool, torch.dtype], list[Latent]] = {}
        self.copies: list[Plain] = []
        self.others: list[Trained] = []
        for part in trained:
            if isinstance(part, Latent):
                kind = part.bits, part.group, part.curved, part.scale_dtype
                kinds.setdefault(kind, []).append(part)
            elif type(part) is Plain and part.master is not part.parameter:
                self.copies.append(part)
            else:
                self.others.append(part)
        self.banks = [Bank(some) for same in kinds.values() for some in _portions(same)]

    @torch.no_grad()
    def publish(self) -> None:
        """As of `Latent`, of each."""
        if self.copies:
            torch._foreach_copy_([p.parameter for p in self.copies], [p.master for p in self.copies])
        for part in (*self.banks, *self.others):
            part.publish()

    @torch.no_grad()
    def collect(self) -> None:
        """As of `Latent`, of each."""
        fresh = [part for part in self.copies if part.parameter.grad is not None]
        if fresh:
            wide = [torch.empty_like(part.master) for part in fresh]
            torch._foreach_copy_(wide, [_taken(part.parameter) for part in fresh])
            _add_all([part.master for part in fresh], wide)
        for part in (*self.banks, *self.others):
            part.collect()


def _portions(latents: Iterable[Latent]) -> Iterator[list[Latent]]:
    """`latents` in order, at most `MOST` numbers at a time."""
    portion: list[Latent] = []
    for found in latents:
        if portion and sum(one.latent.numel() for one in (*portion, found)) > MOST:
            yield portion
            portion = []
        portion.append(found)
    yield portion


def _add_all(masters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """`add_gradient` of each, by a few kernels."""
    known = [*zip(masters, gradients, strict=True)]
    if later := [(master.grad, new) for master, new in known if master.grad is not None]:
        torch._foreach_add_([old for old, _ in later], [new for _, new in later])
    for master, new in known:
        master.grad = new if master.grad is None else master.grad


def _taken(parameter: nn.Parameter) -> Tensor:
    """Its gradient, which it has no more."""
    found = parameter.grad
    assert found is not None
    parameter.grad = None
    return found
