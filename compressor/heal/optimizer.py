"""AdamW with a rate for every tensor relative to its size, warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
SMALL = 0.02  # root mean square that a tensor of zeros (a bias, often) is taken to have
STEP = 1.1  # sizes are rounded to its powers, so that tensors of like size are moved by one kernel


def make_optimizer(
    masters: Iterable[Tensor], rate: float, shares: Iterable[float] | None = None
) -> torch.optim.AdamW:
    """A group for every size of tensor; `base` is its rate at the height of the schedule: `rate` × the
    root mean square, or the share of it that `shares` gives."""
    tensors = list(masters)
    parts = [1.0] * len(tensors) if shares is None else list(shares)
    sizes = torch.stack([m.detach().double().square().mean().sqrt() for m in tensors]).tolist()
    found: dict[int, list[Tensor]] = {}
    for master, size, part in zip(tensors, sizes, parts, strict=True):
        found.setdefault(round(math.log(part * (size or SMALL), STEP)), []).append(master)
    groups = [{"params": found[k], "lr": 0.0, "base": rate * STEP**k} for k in sorted(found)]
    fused = all(tensor.is_cuda for tensor in tensors)
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0, fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every tensor `factor` of its rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base"]


def schedule(done: float, warmup: float) -> float:
    """Factor of the rate when `done` of the run is over: up in a line, down in half a cosine."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * min((done - warmup) / (1 - warmup), 1.0)))


def load_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Give a fresh optimizer the moments that another one of the same tensors had."""
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
