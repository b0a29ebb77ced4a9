"""Training what is stored rounded: a latent weight and a scale for every number that is kept.

The model computes with the rounded value as a plain parameter; before every step its gradient is
handed to the latent weight as it is where the value is within the grid (straight-through, Bengio et
al., arXiv 1308.3432) and to the scale as in LSQ (arXiv 1902.08153). So the passes are those of a
plain model, whatever is rounded in it, and rounding costs a step, not a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr.compressor.rounding.grid import best_scale, nearest, top

SCALE_RATE = 0.3  # of the rate of weights
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Where the numbers of a parameter lie in rows of groups: `rows` gives the matrix [..., R, K] of a
    tensor shaped as the parameter, `back` is its inverse."""

    rows: Change
    back: Change


AS_IT_IS = Place(lambda tensor: tensor, lambda tensor: tensor)


class Latent:
    """The masters of one rounded parameter.

    Args:
        parameter: what the model computes with. bits, group: of its grid.
        scale: [..., R, groups]; None searches them. latent: as `parameter`; None takes its value.
        scale_dtype: what scales are stored in.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        bits: int,
        group: int,
        place: Place = AS_IT_IS,
        *,
        scale: Tensor | None = None,
        latent: Tensor | None = None,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.parameter, self.bits, self.group, self.place = parameter, bits, group, place
        self.scale_dtype, self.top = scale_dtype, top(bits)
        start = parameter.detach() if latent is None else latent
        self.latent = self._groups(start.float()).clone()  # [..., R, groups, G]
        if scale is None:
            found = best_scale(self.latent, bits, dtype=scale_dtype)
        else:
            found = scale.float().to(start.device)[..., None]
        self.scale = found.clone()  # [..., R, groups, 1]

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """What an optimizer moves, each with the share of the rate that it gets."""
        return [(self.latent, 1.0), (self.scale, SCALE_RATE)]

    @torch.no_grad()
    def publish(self) -> None:
        """Give the parameter the rounded value of the masters."""
        scale = self._stored_scale()
        value = nearest(self.latent, scale, self.bits) * scale
        self.parameter.copy_(self.place.back(value.flatten(-2)[..., : self.width]))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's gradient to those of the masters, and drop it."""
        if self.parameter.grad is None:
            return
        gradient, scale = self._groups(self.parameter.grad.float()), self._stored_scale()
        self.parameter.grad = None
        unit = torch.where(scale == 0, 0.0, self.latent / scale)
        within = unit.abs() <= self.top + 0.5
        level = nearest(self.latent, scale, self.bits)
        _add(self.latent, gradient * within)
        _add(self.scale, (gradient * (level - unit * within)).sum(-1, keepdim=True))

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Levels [..., R, K] for a scale of one, and scales [..., R, groups] in the stored dtype."""
        scale = self._stored_scale()
        level = nearest(self.latent, scale, self.bits).flatten(-2)[..., : self.width]
        return level, scale.squeeze(-1).to(self.scale_dtype)

    def _stored_scale(self) -> Tensor:
        return self.scale.to(self.scale_dtype).float()

    def _groups(self, tensor: Tensor) -> Tensor:
        matrix = self.place.rows(tensor)
        self.width = matrix.shape[-1]
        padded = nn.functional.pad(matrix, (0, -self.width % self.group))
        return padded.unflatten(-1, (-1, self.group))


def _add(master: Tensor, gradient: Tensor) -> None:
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


class Plain:
    """A parameter that is stored as it is: its own master."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """As of `Latent`."""
        return [(self.parameter, 1.0)]

    def publish(self) -> None:
        """Nothing to do."""

    def collect(self) -> None:
        """Nothing to do."""


Trained = Plain | Latent
