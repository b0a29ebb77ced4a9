"""Adam (arXiv 1412.6980) with a rate for every tensor, in a few kernels of a GPU for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
EPS = 1e-8


class Adam:
    """Moves `masters` against their gradients.

    Args:
        rates: of each, at a factor of 1.
    """

    def __init__(self, masters: Sequence[Tensor], rates: Sequence[float]) -> None:
        self.masters, self.rates, self.steps = [m.detach() for m in masters], list(rates), 0
        self.mean = [torch.zeros_like(master) for master in self.masters]
        self.square = [torch.zeros_like(master) for master in self.masters]

    @torch.no_grad()
    def move(self, gradients: Sequence[Tensor], factor: float) -> None:
        """One step at `factor` of the rates."""
        self.steps += 1
        given, (fast, slow) = list(gradients), BETAS
        torch._foreach_lerp_(self.mean, given, 1 - fast)
        torch._foreach_mul_(self.square, slow)
        torch._foreach_addcmul_(self.square, given, given, 1 - slow)
        below = torch._foreach_sqrt(self.square)
        torch._foreach_div_(below, (1 - slow**self.steps) ** 0.5)
        torch._foreach_add_(below, EPS)
        start = 1 - fast**self.steps  # the mean starts from zero
        moved = [-(rate * factor / start) for rate in self.rates]
        torch._foreach_addcdiv_(self.masters, self.mean, below, moved)


def rates_of(masters: Sequence[Tensor], shares: Sequence[float], rate: float) -> list[float]:
    """`rate` × the root mean square of each master × its share."""
    sizes = torch.stack([m.detach().square().mean().sqrt() for m in masters]).tolist()
    return [rate * share * size for size, share in zip(sizes, shares, strict=True)]


def factor_at(step: int, steps: int, warm_up: int) -> float:
    """Of the rates at `step` of `steps`: up in a line for so many, and down in a line."""
    return min(1.0, (step + 1) / warm_up) * max(0.0, 1 - step / max(steps, 1))
