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

from blr.kernels.decode.quantized.reference import levels_of, scales_of, values_of

SCALE_RATE = 0.3  # of the rate of weights
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GroupPlace:
    """Where the numbers of a parameter lie in rows of groups: `rows` gives the matrix [..., R, K] of a
    tensor shaped as the parameter, `back` is its inverse."""

    rows: Change
    back: Change


AS_IT_IS = GroupPlace(lambda tensor: tensor, lambda tensor: tensor)


class Latent:
    """The masters of one rounded parameter.

    Args:
        parameter: what the model computes with. bits, group, curved: of its grid.
        scale: [..., R, groups]; None searches them. latent: as `parameter`; None takes its value.
        scale_dtype: what scales are stored in.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        bits: int,
        group: int,
        place: GroupPlace = AS_IT_IS,
        *,
        scale: Tensor | None = None,
        latent: Tensor | None = None,
        scale_dtype: torch.dtype = torch.bfloat16,
        curved: bool = True,
    ) -> None:
        self.parameter, self.bits, self.group, self.place = parameter, bits, group, place
        self.scale_dtype, self.curved = scale_dtype, curved
        start = parameter.detach() if latent is None else latent
        self.latent = self._groups(start.float()).clone()  # [..., R, groups, G]
        if scale is None:
            found = scales_of(self.latent, bits, scale_dtype, curved=curved).float()
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
        levels, scale = self._levels()
        self.take(values_of(levels, scale, self.bits, self.curved))

    def take(self, value: Tensor) -> None:
        """Give the parameter `value`, shaped as the latent weights."""
        self.parameter.copy_(self._ungrouped(value))

    def full(self) -> Tensor:
        """The latent weights, shaped as the parameter."""
        return self._ungrouped(self.latent.detach())

    def _ungrouped(self, value: Tensor) -> Tensor:
        return self.place.back(value.flatten(-2)[..., : self.width])

    def given(self) -> Tensor:
        """The parameter's gradient, shaped as the latent weights, zeros for none; it keeps none."""
        if self.parameter.grad is None:
            return torch.zeros_like(self.latent)
        gradient, self.parameter.grad = self.parameter.grad, None
        return self._groups(gradient.float())

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's gradient to those of the masters, and drop it."""
        if self.parameter.grad is None:
            return
        levels, scale = self._levels()
        found = straight_through(self.latent, scale, levels, self.given(), self.bits, self.curved)
        for master, gradient in zip((self.latent, self.scale), found, strict=True):
            add_gradient(master, gradient)

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Levels int8 [..., R, K'] of whole groups, and scales [..., R, groups] as they are stored."""
        levels, scale = self._levels()
        return levels.flatten(-2), scale.squeeze(-1).to(self.scale_dtype)

    def _levels(self) -> tuple[Tensor, Tensor]:
        """Of the latent weights, with the scales as they are stored."""
        scale = self.scale.to(self.scale_dtype).float()
        return levels_of(self.latent, scale, self.bits, self.curved), scale

    def _groups(self, tensor: Tensor) -> Tensor:
        matrix = self.place.rows(tensor)
        self.width = matrix.shape[-1]
        missing = -self.width % self.group  # rarely any: a copy of all that is trained, every step
        padded = nn.functional.pad(matrix, (0, missing)) if missing else matrix
        return padded.unflatten(-1, (-1, self.group))


def straight_through(
    latent: Tensor, scale: Tensor, levels: Tensor, gradient: Tensor, bits: int, curved: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of latent weights [..., G] and of scales [..., 1] from that of the rounded values."""
    unit = torch.where(scale == 0, 0.0, latent / scale)
    step = values_of(levels, torch.ones_like(scale), bits, curved)
    within = (unit - step).abs() <= 1  # beyond the outermost levels by no more than the steps are
    return gradient * within, (gradient * (step - unit * within)).sum(-1, keepdim=True)


def add_gradient(master: Tensor, gradient: Tensor) -> None:
    """Leave `gradient` at `master`, with what is there."""
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


class Plain:
    """A parameter that is stored as it is.

    Args:
        parameter: what the model computes with. master: what an optimizer moves in its place, in a wider
            dtype; None: the parameter itself.
    """

    def __init__(self, parameter: nn.Parameter, master: Tensor | None = None) -> None:
        self.parameter = parameter
        self.master: Tensor = parameter if master is None else master

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """As of `Latent`."""
        return [(self.master, 1.0)]

    @torch.no_grad()
    def publish(self) -> None:
        """Give the parameter the value of its master."""
        if self.master is not self.parameter:
            self.parameter.copy_(self.master)

    @torch.no_grad()
    def collect(self) -> None:
        """As of `Latent`."""
        if self.master is self.parameter or self.parameter.grad is None:
            return
        add_gradient(self.master, self.parameter.grad.to(self.master.dtype))
        self.parameter.grad = None


Trained = Plain | Latent
