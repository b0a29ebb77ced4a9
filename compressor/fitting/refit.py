"""Joint refit of all factors of one block against the dense block's output.

The block sees the hidden states of the compressed prefix and should give those of the dense
model; the error is weighted by the Fisher information of the block's output, so that what the
loss does not feel is not paid for. Adam, each tensor moving at a rate relative to its own size;
the best epoch on held-back windows is kept, the start included, so a refit never makes that error
worse. Block-wise reconstruction is that of BRECQ (arXiv 2102.05426).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr.compressor.fitting.blocks import Batch, run_block
from blr.compressor.rounding.latent import Trained
from blr.compressor.structures.linalg import cholesky

RATE = 0.01  # of a tensor's root mean square, a step
WARM_UP = 0.05  # of all steps
HELD_BACK = 16  # one batch in so many is not trained on
RIDGE = 0.01  # of the mean diagonal of the output metric


@dataclass(frozen=True)
class Refit:
    """Error on the held-back batches before and after; `after` ≤ `before`."""

    before: float
    after: float


def refit_block(
    block: nn.Module,
    trained: list[Trained],
    batches: list[Batch],
    targets: list[Tensor],
    metric: Tensor | None,
    epochs: int,
    seed: int,
) -> Refit:
    """Move what is `trained` of `block` in place.

    Args:
        trained: parameters of the block that want gradients, stored as they are or rounded.
        batches: their `student` states enter the block. targets: dense outputs [m, w, d], one a batch.
        metric: Fisher information [d, d] of the block's output, or None for plain squares.
    """
    masters = [master for part in trained for master, _ in part.masters]
    device = masters[0].device
    root = None if metric is None else _root(metric.to(device))
    order = torch.Generator().manual_seed(seed)
    held = list(range(0, len(batches), HELD_BACK)) if len(batches) >= 4 else []
    train = [n for n in range(len(batches)) if n not in held]
    optimizer, schedule = _optimizer(trained, epochs * len(train))

    def loss(n: int) -> Tensor:
        return _loss(block, batches[n], targets[n], root)

    best = before = _mean(loss, held or train)
    kept = [master.detach().clone() for master in masters]
    for _ in range(epochs):
        for n in torch.randperm(len(train), generator=order).tolist():
            optimizer.zero_grad(set_to_none=True)
            loss(train[n]).backward()
            _move(trained, optimizer)
            schedule.step()
        now = _mean(loss, held or train)
        if now < best:
            best, kept = now, [master.detach().clone() for master in masters]
    with torch.no_grad():
        for master, value in zip(masters, kept, strict=True):
            master.copy_(value)
    for part in trained:
        part.publish()
    return Refit(before, best)


def _move(trained: list[Trained], optimizer: torch.optim.Optimizer) -> None:
    for part in trained:
        part.collect()
    optimizer.step()
    for part in trained:
        part.publish()


def _root(metric: Tensor) -> Tensor:
    """Lower Cholesky factor of the metric with a small ridge, in float32."""
    metric = metric.double() / metric.diagonal().mean().clamp_min(1e-30)
    identity = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    return cholesky(metric + RIDGE * identity).float()


def _optimizer(
    trained: list[Trained], steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    masters = [found for part in trained for found in part.masters]
    groups = [{"params": [m], "lr": RATE * share * _size(m)} for m, share in masters]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    warm = max(1, round(WARM_UP * steps))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm) * max(0.0, 1 - step / max(steps, 1))
    )


def _size(master: Tensor) -> float:
    """Root mean square."""
    return float(master.detach().square().mean().sqrt())


def _loss(block: nn.Module, batch: Batch, target: Tensor, root: Tensor | None) -> Tensor:
    device = next(block.parameters()).device
    mask = batch.mask.to(device)
    missed = (run_block(block, batch.student.to(device), batch) - target.to(device))[mask]
    if root is not None:
        missed = missed @ root
    return missed.square().sum(-1).mean()


@torch.no_grad()
def _mean(loss: Callable[[int], Tensor], chosen: list[int]) -> float:
    return sum(float(loss(n)) for n in chosen) / len(chosen)
