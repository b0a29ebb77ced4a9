"""Trains many rounded parameters together: their masters lie in one buffer for each grid, so that a step
is a few kernels of a GPU, however many layers a block has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from blr.compressor.structures.latent import Latent, Plain, Trained, add_gradient, straight_through
from blr.kernels.decode.quantized.reference import levels_of, values_of

MOST = 1 << 26  # numbers of a bank: a step holds some forty bytes of each for a moment


class Bank:
    """Publishes and collects latents of one grid together. The masters of each become views of `latent`
    [n, G] and `scale` [n, 1]."""

    def __init__(self, latents: Sequence[Latent]) -> None:
        self.latents, self.bits, self.scale_dtype = latents, latents[0].bits, latents[0].scale_dtype
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
        values = self._split(values_of(self.levels, scale, self.bits))
        for found, value in zip(self.latents, values, strict=True):
            found.take(value.view_as(found.latent))

    def collect(self) -> None:
        """Add the gradients of the values published last to those of all masters."""
        if all(found.parameter.grad is None for found in self.latents):
            return
        rows = torch.cat([found.given().flatten(0, -2) for found in self.latents])
        scale = self.scale.to(self.scale_dtype).float()
        found = straight_through(self.latent, scale, self.levels, rows, self.bits)
        for latent, gradient, of_scale in zip(self.latents, *map(self._split, found), strict=True):
            add_gradient(latent.latent, gradient.view_as(latent.latent))
            add_gradient(latent.scale, of_scale.view_as(latent.scale))

    def _levels(self) -> tuple[Tensor, Tensor]:
        scale = self.scale.to(self.scale_dtype).float()
        return levels_of(self.latent, scale, self.bits), scale

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.sizes)


class Banks:
    """All that is trained: rounded parameters in banks, parameters with a wider master together, others
    one by one."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        kinds: dict[tuple[int, int, torch.dtype], list[Latent]] = {}
        self.copies: list[Plain] = []
        self.others: list[Trained] = []
        for part in trained:
            if isinstance(part, Latent):
                kinds.setdefault((part.bits, part.group, part.scale_dtype), []).append(part)
            elif type(part) is Plain and part.master is not part.parameter:
                self.copies.append(part)
            else:
                self.others.append(part)
        self.banks = [Bank(some) for same in kinds.values() for some in _portions(same)]

    @torch.no_grad()
    def publish(self) -> None:
        """Give all parameters the values of their masters."""
        if self.copies:
            torch._foreach_copy_([p.parameter for p in self.copies], [p.master for p in self.copies])
        for part in (*self.banks, *self.others):
            part.publish()

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of all parameters to those of their masters, and drop them."""
        fresh = [part for part in self.copies if part.parameter.grad is not None]
        if fresh:
            wide = [torch.empty_like(part.master) for part in fresh]
            given = [part.parameter.grad for part in fresh if part.parameter.grad is not None]
            torch._foreach_copy_(wide, given)
            for copy in fresh:
                copy.parameter.grad = None
            _add_all([part.master for part in fresh], wide)
        for part in (*self.banks, *self.others):
            part.collect()


def _portions(latents: Iterable[Latent]) -> Iterator[list[Latent]]:
    """Split `latents`, in order, into portions of at most `MOST` numbers."""
    portion: list[Latent] = []
    for found in latents:
        if portion and sum(one.latent.numel() for one in (*portion, found)) > MOST:
            yield portion
            portion = []
        portion.append(found)
    yield portion


def _add_all(masters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to masters as `add_gradient` does, by a few kernels."""
    known = [*zip(masters, gradients, strict=True)]
    if later := [(master.grad, new) for master, new in known if master.grad is not None]:
        torch._foreach_add_([old for old, _ in later], [new for _, new in later])
    for master, new in known:
        master.grad = new if master.grad is None else master.grad
