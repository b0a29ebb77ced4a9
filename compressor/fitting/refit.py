"""Joint refit of all factors of one block against the dense block's output.

The block sees the hidden states of the compressed prefix and should give those of the dense
model; the error is weighted by the Fisher information of the block's output, so that what the
loss does not feel is not paid for. Adam, each tensor moving at a rate relative to its own size;
the best epoch on held-back windows is kept, the start included, so a refit never makes that error
worse. Block-wise reconstruction is that of BRECQ (arXiv 2102.05426).

A step is one batch. Where it is large, its windows are taken in parts, whose gradients are added in
their order: processes share out the parts, and the result does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr.compressor.base.device import tensor_cores
from blr.compressor.base.processes import OrderedSum, Processes, rounds
from blr.compressor.fitting.adam import Adam, factor_at, rates_of
from blr.compressor.fitting.batches import Batch, window_rows
from blr.compressor.fitting.capture import Captured, alike
from blr.compressor.fitting.running import run_block
from blr.compressor.fitting.sizes import HELD_BACK, PART_WORK
from blr.compressor.structures.bank import Banks
from blr.compressor.structures.latent import Trained
from blr.compressor.structures.linalg import cholesky

RATE = 0.01  # of a tensor's root mean square, a step
PACKED_RATE = 0.005  # where some of them are rounded
WARM_UP = 0.05  # of all steps
RIDGE = 0.01  # of the mean diagonal of the output metric


@dataclass(frozen=True)
class Refit:
    """Error on the held-back batches before and after; `after` ≤ `before`."""

    before: float
    after: float


class Refitting:
    """Moves what is `trained` of `block` in place.

    Args:
        trained: parameters of the block that want gradients, stored as they are or rounded.
        batches: their `student` states enter the block, each with the process that owns the batch.
        targets: dense outputs [m, w, d] of this process's batches, by number.
        metric: Fisher information [d, d] of the block's output, or None for plain squares.
    """

    def __init__(
        self,
        block: nn.Module,
        trained: list[Trained],
        processes: Processes,
        batches: list[Batch],
        targets: dict[int, Tensor],
        metric: Tensor | None,
    ) -> None:
        self.block, self.trained, self.processes = block, Banks(trained), processes
        self.parameters = [part.parameter for part in trained]
        found = [master for part in trained for master in part.masters]
        self.masters, self.shares = [master for master, _ in found], [share for _, share in found]
        self.rate = PACKED_RATE if self.trained.banks else RATE
        self.batches, self.targets, self.device = batches, targets, self.masters[0].device
        self.root = None if metric is None else _root(metric.to(self.device))
        held = list(range(0, len(batches), HELD_BACK)) if len(batches) >= 4 else []
        self.train = [n for n in range(len(batches)) if n not in held]
        self.graph: Captured | None = None
        self.captured = alike(batches) if self.device.type == "cuda" else [False] * len(batches)
        self.held = held or self.train

    def run(self, epochs: int, seed: int, advance: Callable[[int], None] = lambda _: None) -> Refit:
        """Train for so many epochs, of each of which `advance` is told, and keep the best; the batches'
        order follows from `seed`."""
        order = torch.Generator().manual_seed(seed)
        optimizer = Adam(self.masters, rates_of(self.masters, self.shares, self.rate))
        steps = epochs * len(self.train)
        best = before = self._judge()
        kept = self._values()
        for epoch in range(epochs):
            advance(epoch)
            for n in torch.randperm(len(self.train), generator=order).tolist():
                with tensor_cores(self.device):
                    self._gradients(self.train[n])
                self._move(optimizer, factor_at(optimizer.steps, steps, max(1, round(WARM_UP * steps))))
            now = self._judge()
            if now < best:
                best, kept = now, self._values()
        with torch.no_grad():
            for master, value in zip(self.masters, kept, strict=True):
                master.copy_(value)
        self.trained.publish()
        return Refit(before, best)

    def _values(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    def _move(self, optimizer: Adam, factor: float) -> None:
        self.trained.collect()
        optimizer.move([_gradient(master) for master in self.masters], factor)
        for master in self.masters:
            master.grad = None  # banks add to what is there
        self.trained.publish()

    @torch.no_grad()
    def _judge(self) -> float:
        """Mean error of the held-back batches, each taken by the process that has it."""
        mine = {n: self._whole(n) for n in self.held if self.processes.owns(n)}
        found = {n: error for part in self.processes.gather(mine) for n, error in part.items()}
        return sum(found[n] for n in self.held) / len(self.held)

    def _whole(self, n: int) -> float:
        batch = self.batches[n]
        with tensor_cores(self.device):
            return float(self._loss(batch, batch.student, self.targets[n], batch.tokens))

    def _gradients(self, n: int) -> None:
        """Leave those of the batch's mean error in the parameters."""
        source, batch = self.processes.owner(n), self.batches[n]
        student = self.processes.shared(batch.student if self.processes.owns(n) else None, source)
        target = self.processes.shared(self.targets.get(n), source)
        tokens, parts = batch.tokens, self._parts(batch)
        windows = torch.arange(len(batch.mask)).tensor_split(parts)
        total = OrderedSum(self.processes, parts)
        for turn in rounds(self.processes, parts):
            at = turn * self.processes.count + self.processes.rank
            whole = parts == 1 and at == 0 and self._replayed(n, student, target)
            if at < parts and not whole:
                self._part(batch, student, target, windows[at], tokens)
            total.add(self._flat() if at < parts else None)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, found in zip(self.parameters, total.total().split(sizes), strict=True):
            parameter.grad = found.view_as(parameter)

    def _parts(self, batch: Batch) -> int:
        """Into how many its windows are split: a power of two, by the work alone."""
        work = 6 * batch.mask.numel() * sum(parameter.numel() for parameter in self.parameters)
        most = min(len(batch.mask), max(work // PART_WORK, 1))
        return 1 << (most.bit_length() - 1)

    def _part(self, batch: Batch, student: Tensor, target: Tensor, windows: Tensor, tokens: int) -> None:
        """Leave the gradients of the error of some windows of the batch."""
        part = window_rows(batch, windows)
        if part is not batch:
            rows = windows.to(student.device)
            student, target = student[rows], target[rows]
        for parameter in self.parameters:
            parameter.grad = None
        self._loss(part, student, target, tokens).backward()

    def _flat(self) -> Tensor:
        """The gradients [n] of all parameters."""
        return torch.cat([_gradient(parameter).flatten() for parameter in self.parameters])

    def _replayed(self, n: int, student: Tensor, target: Tensor) -> bool:
        """Whether a CUDA graph has left the gradients of a batch's error."""
        if not self.captured[n]:
            return False
        batch = self.batches[n]

        def passes(student: Tensor, target: Tensor) -> None:
            self._loss(batch, student, target, batch.tokens).backward()

        try:
            self.graph = self.graph or Captured(passes, self.parameters, (student, target))
        except RuntimeError:  # whatever a model does that no graph can hold
            self.captured = [False] * len(self.batches)
            return False
        self.graph.replay(student, target)
        return True

    def _loss(self, batch: Batch, student: Tensor, target: Tensor, tokens: int) -> Tensor:
        """Error of the batch's tokens, as its share in a mean over so many `tokens`."""
        out = run_block(self.block, student.to(self.device), batch)
        missed = batch.rows(out - target.to(self.device))
        if self.root is not None:
            missed = missed @ self.root
        return missed.square().sum() / tokens


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _root(metric: Tensor) -> Tensor:
    """Lower Cholesky factor of the metric with a small ridge, in float32."""
    metric = metric.double() / metric.diagonal().mean().clamp_min(1e-30)
    identity = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    return cholesky(metric + RIDGE * identity).float()
