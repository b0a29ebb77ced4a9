"""AdamW with a rate for every tensor relative to its size, warm-up and cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
SMALL = 0.02  # root mean square that a tensor of zeros (a bias, often) is taken to have
STEP = 1.1  # sizes are rounded to its powers, so that tensors of like size are moved by one kernel

Moments = dict[str, Tensor]


def make_optimizer(
    masters: Iterable[Tensor], rate: float, sizes: Iterable[float], shares: Iterable[float]
) -> torch.optim.AdamW:
    """A group for every size of tensor; `base` is its rate at the height of the schedule: the share in
    `shares` of `rate` × the root mean square in `sizes`. Moments are there from the start: what passes
    may take is what is left beside them."""
    tensors = list(masters)
    alike: dict[int, list[Tensor]] = {}
    for master, size, part in zip(tensors, sizes, shares, strict=True):
        alike.setdefault(round(math.log(part * (size or SMALL), STEP)), []).append(master)
    groups = [{"params": alike[k], "lr": 0.0, "base": rate * STEP**k} for k in sorted(alike)]
    fused = all(tensor.is_cuda for tensor in tensors)
    found = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0, fused=fused)
    for tensor in tensors:  # as its first step makes them
        step = torch.zeros((), device=tensor.device if fused else "cpu")
        moments = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
        found.state[tensor] = {"step": step, **moments}
    return found


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every tensor `factor` of its rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base"]


def schedule(done: float, warmup: float) -> float:
    """Factor of the rate when `done` of the run is over: up in a line, down in half a cosine."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * min((done - warmup) / (1 - warmup), 1.0)))


def moments_of(optimizer: torch.optim.Optimizer, masters: dict[str, Tensor]) -> dict[str, Moments]:
    """What it keeps of every master, by name."""
    return {name: optimizer.state[m] for name, m in masters.items() if m in optimizer.state}


def load_moments(
    optimizer: torch.optim.Optimizer, masters: dict[str, Tensor], moments: dict[str, Moments]
) -> None:
    """Give a fresh optimizer of the same masters what `moments_of` another one gave."""
    names = {id(master): name for name, master in masters.items()}
    order = [names[id(m)] for group in optimizer.param_groups for m in group["params"]]
    known = {n: moments[name] for n, name in enumerate(order) if name in moments}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": known})
