"""Many rounded parameters trained together: their masters lie in one buffer for each grid, so that a
step is a few kernels of a GPU, however many layers a block has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from blr.compressor.rounding.latent import Latent, Plain, Trained, straight_through
from blr.kernels.quantized.reference import levels_of, values_of


class Bank:
    """Latents of one grid, as their `publish` and `collect` would do it one by one.

    From here on the masters of each are views of `latent` [n, G] and `scale` [n, 1].
    """

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
        """Leave the gradients of all masters, of the values published last."""
        rows = torch.cat([found.given().flatten(0, -2) for found in self.latents])
        scale = self.scale.to(self.scale_dtype).float()
        found = straight_through(self.latent, scale, self.levels, rows, self.bits)
        for latent, gradient, of_scale in zip(self.latents, *map(self._split, found), strict=True):
            latent.latent.grad = gradient.view_as(latent.latent)
            latent.scale.grad = of_scale.view_as(latent.scale)

    def _levels(self) -> tuple[Tensor, Tensor]:
        scale = self.scale.to(self.scale_dtype).float()
        return levels_of(self.latent, scale, self.bits), scale

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.sizes)


class Banks:
    """All that is `trained` of a block: what is rounded in banks, the rest as it is."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        kinds: dict[tuple[int, int, torch.dtype], list[Latent]] = {}
        plain: list[Plain] = []
        for part in trained:
            if isinstance(part, Latent):
                kinds.setdefault((part.bits, part.group, part.scale_dtype), []).append(part)
            else:
                plain.append(part)
        self.banks = [Bank(latents) for latents in kinds.values()]
        self.parts: list[Bank | Plain] = [*self.banks, *plain]

    @torch.no_grad()
    def publish(self) -> None:
        """As of `Latent`."""
        for part in self.parts:
            part.publish()

    @torch.no_grad()
    def collect(self) -> None:
        """As of `Latent`, of parameters that all have gradients."""
        for part in self.parts:
            part.collect()
