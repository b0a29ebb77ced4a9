"""Trains rounded weights by a latent weight for every number and a scale for every group.

The model computes with the rounded value as a plain parameter. Before every step its gradient is handed
to the latent weight as it is where the value is within the grid (straight-through, arXiv 1308.3432) and
to the scale as in LSQ (arXiv 1902.08153): rounding costs a step, not a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr.kernels.decode.quantized.reference import levels_of, scales_of, shared_scales, values_of

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


@dataclass(frozen=True)
class RoundedGrid:
    """The grid that numbers are rounded to: `bits` each, a scale in `scale_dtype` for every `group`;
    `curved` and `superblocks` as of `QuantizedSpec`."""

    bits: int
    group: int
    scale_dtype: torch.dtype = torch.bfloat16
    curved: bool = True
    superblocks: bool = False

    def rounded(self, latent: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Levels of numbers [..., G], and their scales [..., 1] as they are stored, in float32."""
        stored = self.stored(scale)
        return levels_of(latent, stored, self.bits, self.curved), stored

    def stored(self, scale: Tensor) -> Tensor:
        """Scales as they are stored, in float32."""
        scale = scale.to(self.scale_dtype).float()
        return shared_scales(scale.flatten(), self.bits).view_as(scale) if self.superblocks else scale

    def values(self, levels: Tensor, scale: Tensor) -> Tensor:
        """The numbers that levels [..., G] and scales [..., 1] stand for."""
        return values_of(levels, scale, self.bits, self.curved)

    def gradients(
        self, latent: Tensor, scale: Tensor, levels: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of numbers [..., G] and of stored scales [..., 1], from that of rounded values."""
        unit = torch.where(scale == 0, 0.0, latent / scale)
        step = self.values(levels, torch.ones_like(scale))
        within = (unit - step).abs() <= 1  # beyond the outermost levels by no more than the steps are
        return gradient * within, (gradient * (step - unit * within)).sum(-1, keepdim=True)


class Latent:
    """A parameter that is trained rounded to a `grid`, with its masters: latent weights and scales.
    `Banks` publish and collect it.

    Args:
        parameter: what the model computes with. scale: [..., R, groups]; None searches the best.
        latent: of the parameter's shape; None takes its value.
    """

    def __init__(
        self, parameter: nn.Parameter, grid: RoundedGrid, place: GroupPlace = AS_IT_IS,
        scale: Tensor | None = None, latent: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.parameter, self.grid, self.place = parameter, grid, place
        start = parameter.detach() if latent is None else latent
        self.latent = self._groups(start.float()).clone()  # [..., R, groups, G]
        if scale is None:
            found = scales_of(self.latent, grid.bits, grid.scale_dtype, curved=grid.curved).float()
        else:
            found = scale.float().to(start.device)[..., None]
        self.scale = found.clone()  # [..., R, groups, 1]

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """The tensors that an optimizer moves, each with its share of the learning rate."""
        return [(self.latent, 1.0), (self.scale, SCALE_RATE)]

    def hold(self, latent: Tensor, scale: Tensor) -> None:
        """Move the masters to this memory."""
        self.latent, self.scale = latent, scale

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

    def rounded(self) -> tuple[Tensor, Tensor]:
        """The rounded weights: levels int8 [..., R, K'], padded to whole groups, and scales [..., R,
        groups] as they are stored."""
        levels, scale = self.grid.rounded(self.latent, self.scale)
        return levels.flatten(-2), scale.squeeze(-1).to(self.grid.scale_dtype)

    def _groups(self, tensor: Tensor) -> Tensor:
        matrix = self.place.rows(tensor)
        self.width = matrix.shape[-1]
        missing = -self.width % self.grid.group  # rarely any: a copy of all that is trained, every step
        padded = nn.functional.pad(matrix, (0, missing)) if missing else matrix
        return padded.unflatten(-1, (-1, self.grid.group))


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

    def collect(self) -> None:
        """Nothing to do: the master is the parameter, or `Banks` copy it with others."""


Trained = Plain | Latent


class LatentStack(Latent):
    """Latents of one grid, place and shape as one, [n, ...]: what they hold become views of it."""

    def __init__(self, members: Sequence[Latent]) -> None:
        first, self.members = members[0], members
        self.parameter = stacked(members)
        self.grid, self.place, self.width = first.grid, first.place, first.width
        self.hold(torch.stack([m.latent for m in members]), torch.stack([m.scale for m in members]))

    def hold(self, latent: Tensor, scale: Tensor) -> None:
        """Move the masters, and with them those of the members, to this memory."""
        super().hold(latent, scale)
        for own, *held in zip(self.members, latent, scale, strict=True):
            own.hold(*held)


class PlainStack(Plain):
    """Parameters that are trained as they are, as one, [n, ...]."""


def stacked(members: Sequence[Trained]) -> nn.Parameter:
    """The parameters of `members` as one [n, ...], of which they become views."""
    found = torch.stack([member.parameter.detach() for member in members])
    for member, own in zip(members, found, strict=True):
        member.parameter.data = own
    return nn.Parameter(found, requires_grad=False)


def joined(members: Sequence[Trained]) -> Trained:
    """What is trained in place of `members`, of one kind and shape."""
    latents = [member for member in members if isinstance(member, Latent)]
    return LatentStack(latents) if latents else PlainStack(stacked(members))


class Bank:
    """Latents of one grid together. The masters of each become views of `latent` [n, G] and `scale`
    [n, 1]."""

    def __init__(self, latents: Sequence[Latent]) -> None:
        self.latents, self.grid = latents, latents[0].grid
        self.latent = torch.cat([found.latent.flatten(0, -2) for found in latents])
        self.scale = torch.cat([found.scale.flatten(0, -2) for found in latents])
        self.sizes = [found.scale.numel() for found in latents]
        rows, scales = self._split(self.latent), self._split(self.scale)
        for found, row, scale in zip(latents, rows, scales, strict=True):
            found.hold(row.view_as(found.latent), scale.view_as(found.scale))
        self.levels = self.grid.rounded(self.latent, self.scale)[0]

    def publish(self) -> None:
        """Give the parameters the rounded values of the masters."""
        self.levels, scale = self.grid.rounded(self.latent, self.scale)
        values = self._split(self.grid.values(self.levels, scale))
        for found, value in zip(self.latents, values, strict=True):
            found.take(value.view_as(found.latent))

    def collect(self) -> None:
        """Add the gradients of the values published last to those of all masters."""
        if all(found.parameter.grad is None for found in self.latents):
            return
        rows = torch.cat([found.given().flatten(0, -2) for found in self.latents])
        scale = self.grid.stored(self.scale)
        of_latents, of_scales = self.grid.gradients(self.latent, scale, self.levels, rows)
        split = zip(self.latents, self._split(of_latents), self._split(of_scales), strict=True)
        for found, row, of_scale in split:
            shaped = [row.view_as(found.latent), of_scale.view_as(found.scale)]
            add_gradients([found.latent, found.scale], shaped)

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.sizes)


class Banks:
    """All that is trained: rounded parameters in banks, parameters with a wider master together, others
    one by one."""

    def __init__(self, trained: Iterable[Trained]) -> None:
        kinds: dict[RoundedGrid, list[Latent]] = {}
        self.copies: list[Plain] = []
        self.others: list[Plain] = []
        for part in trained:
            if isinstance(part, Latent):
                kinds.setdefault(part.grid, []).append(part)
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
        for bank in self.banks:
            bank.publish()

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
            add_gradients([part.master for part in fresh], wide)
        held: list[Bank | Plain] = [*self.banks, *self.others]
        for part in held:
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


def add_gradients(masters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add new gradients to those that `masters` have, by a few kernels."""
    known = [*zip(masters, gradients, strict=True)]
    if later := [(master.grad, new) for master, new in known if master.grad is not None]:
        torch._foreach_add_([old for old, _ in later], [new for _, new in later])
    for master, new in known:
        master.grad = new if master.grad is None else master.grad
