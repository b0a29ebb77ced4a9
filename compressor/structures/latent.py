"""Trains rounded weights by a latent weight for every number and a scale for every group.

The model computes with the rounded value as a plain parameter; before every step its gradient is
handed to the latent weight as it is where the value is within the grid (straight-through, Bengio et
al., arXiv 1308.3432) and to the scale as in LSQ (arXiv 1902.08153). So the passes are those of a
plain model, whatever is rounded in it, and rounding costs a step, not a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr.kernels.decode.quantized.reference import (
    levels_of,
    scales_of,
    shared_scales,
    values_of,
)

SCALE_RATE = 0.3  # of the rate of weights
MOST = 1 << 26  # numbers of a bank: a step holds some forty bytes of each for a moment
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GroupPlace:
    """How the numbers of a parameter are ordered in groups. rows: turns a tensor of the parameter's
    shape into the matrix [..., R, K] whose rows are split into groups. back: the inverse."""

    rows: Change
    back: Change


AS_IT_IS = GroupPlace(lambda tensor: tensor, lambda tensor: tensor)


class Latent:
    """A parameter that is trained rounded, with its masters: latent weights and scales.

    Args:
        parameter: what the model computes with. bits, group, curved, superblocks: of its grid.
        scale: [..., R, groups]; None searches the best. latent: of the parameter's shape; None takes its
            value. scale_dtype: what scales are stored in.
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
        superblocks: bool = False,
    ) -> None:
        self.parameter, self.bits, self.group, self.place = parameter, bits, group, place
        self.scale_dtype, self.curved, self.superblocks = scale_dtype, curved, superblocks
        start = parameter.detach() if latent is None else latent
        self.latent = self._groups(start.float()).clone()  # [..., R, groups, G]
        if scale is None:
            found = scales_of(self.latent, bits, scale_dtype, curved=curved).float()
        else:
            found = scale.float().to(start.device)[..., None]
        self.scale = found.clone()  # [..., R, groups, 1]

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """The tensors that an optimizer moves, each with its share of the learning rate."""
        return [(self.latent, 1.0), (self.scale, SCALE_RATE)]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters and give the parameter that value."""
        levels, scale = self._levels()
        self.take(values_of(levels, scale, self.bits, self.curved))

    def take(self, value: Tensor) -> None:
        """Give the parameter a value that is shaped as the latent weights."""
        self.parameter.copy_(self._ungrouped(value))

    def full(self) -> Tensor:
        """The latent weights, shaped as the parameter."""
        return self._ungrouped(self.latent.detach())

    def _ungrouped(self, value: Tensor) -> Tensor:
        return self.place.back(value.flatten(-2)[..., : self.width])

    def given(self) -> Tensor:
        """Take the parameter's gradient from it, shaped as the latent weights; zeros for none."""
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
        """The rounded weights: levels int8 [..., R, K'], padded to whole groups, and scales [..., R,
        groups] as they are stored."""
        levels, scale = self._levels()
        return levels.flatten(-2), scale.squeeze(-1).to(self.scale_dtype)

    def _levels(self) -> tuple[Tensor, Tensor]:
        """Levels of the latent weights, and the scales as they are stored."""
        scale = stored_scales(self)
        return levels_of(self.latent, scale, self.bits, self.curved), scale

    def _groups(self, tensor: Tensor) -> Tensor:
        matrix = self.place.rows(tensor)
        self.width = matrix.shape[-1]
        missing = -self.width % self.group  # rarely any: a copy of all that is trained, every step
        padded = nn.functional.pad(matrix, (0, missing)) if missing else matrix
        return padded.unflatten(-1, (-1, self.group))


def stored_scales(masters: Latent | Bank) -> Tensor:
    """The scales of `masters` as they are stored, in float32."""
    scale = masters.scale.to(masters.scale_dtype).float()
    return shared_scales(scale.flatten(), masters.bits).view_as(scale) if masters.superblocks else scale


def straight_through(
    latent: Tensor, scale: Tensor, levels: Tensor, gradient: Tensor, bits: int, curved: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of latent weights [..., G] and of scales [..., 1], from that of the rounded values."""
    unit = torch.where(scale == 0, 0.0, latent / scale)
    step = values_of(levels, torch.ones_like(scale), bits, curved)
    within = (unit - step).abs() <= 1  # beyond the outermost levels by no more than the steps are
    return gradient * within, (gradient * (step - unit * within)).sum(-1, keepdim=True)


def add_gradient(master: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to the gradient of `master`."""
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


class Plain:
    """A parameter that is trained as it is. master: what an optimizer moves in its place, in a wider
    dtype; None: the parameter itself."""

    def __init__(self, parameter: nn.Parameter, master: Tensor | None = None) -> None:
        self.parameter = parameter
        self.master: Tensor = parameter if master is None else master

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """The tensor that an optimizer moves, with its share of the learning rate."""
        return [(self.master, 1.0)]

    @torch.no_grad()
    def publish(self) -> None:
        """Give the parameter the value of its master."""
        if self.master is not self.parameter:
            self.parameter.copy_(self.master)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's gradient to that of a wider master, and drop it."""
        if self.master is self.parameter or self.parameter.grad is None:
            return
        add_gradient(self.master, self.parameter.grad.to(self.master.dtype))
        self.parameter.grad = None


Trained = Plain | Latent


class Bank:
    """Publishes and collects latents of one grid together. The masters of each become views of `latent`
    [n, G] and `scale` [n, 1]."""

    def __init__(self, latents: Sequence[Latent]) -> None:
        self.latents, self.bits, self.scale_dtype = latents, latents[0].bits, latents[0].scale_dtype
        self.curved, self.superblocks = latents[0].curved, latents[0].superblocks
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
        """Add the gradients of the values published last to those of all masters."""
        if all(found.parameter.grad is None for found in self.latents):
            return
        rows = torch.cat([found.given().flatten(0, -2) for found in self.latents])
        scale = stored_scales(self)
        found = straight_through(self.latent, scale, self.levels, rows, self.bits, self.curved)
        for latent, gradient, of_scale in zip(self.latents, *map(self._split, found), strict=True):
            add_gradient(latent.latent, gradient.view_as(latent.latent))
            add_gradient(latent.scale, of_scale.view_as(latent.scale))

    def _levels(self) -> tuple[Tensor, Tensor]:
        scale = stored_scales(self)
        return levels_of(self.latent, scale, self.bits, self.curved), scale

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.sizes)


class Banks:
    """All that is trained: rounded parameters in banks, parameters with a wider master together, others
    one by one."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        kinds: dict[tuple[object, ...], list[Latent]] = {}
        self.copies: list[Plain] = []
        self.others: list[Trained] = []
        for part in trained:
            if isinstance(part, Latent):
                kind = part.bits, part.group, part.curved, part.superblocks, part.scale_dtype
                kinds.setdefault(kind, []).append(part)
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
