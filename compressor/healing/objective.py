"""The loss of a micro-batch, and the figures of merit on held-back windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr.compressor.base.errors import CapabilityError
from blr.compressor.healing.losses import (
    Answers,
    Head,
    Measure,
    kl,
    kl_of_top,
    lm,
    missed_states,
    summed,
)
from blr.compressor.healing.settings import HIDDEN, HealOptions
from blr.compressor.healing.student_and_teacher import Pair

HELD_BATCH = 8  # windows at once


@dataclass(frozen=True)
class Merit:
    """Nats a token on held-back windows: KL from the teacher to the student, and the loss of either on
    the text itself."""

    kl: float
    student: float
    teacher: float

    def judged(self, loss: str) -> float:
        """The one that is minimized."""
        return self.kl if loss == "kl" else self.student


class Objective:
    """Σ over the tokens of windows [m, w] of what `options` minimize.

    idle: positions at the start of every window that predict no token of the text.
    """

    def __init__(self, pair: Pair, options: HealOptions, probe: Tensor, idle: int = 0) -> None:
        self.student = Answers(pair.student, probe)
        self.teacher = Answers(pair.teacher, probe)
        self.options, self.device, self.idle = options, pair.device, idle
        self.measure, self.weight = _measure(options), self._weight(probe)
        if options.compile:
            self.measure = torch.compile(self.measure, dynamic=False)
        self._kept: dict[tuple[int, int], Tensor] = {}

    def scored(self, window: int) -> int:
        """Tokens of a window that the loss sums over."""
        return window - 1 - self.idle

    @torch.no_grad()
    def _weight(self, probe: Tensor) -> float:
        """Of the distance between the blocks' outputs, where those of both models are alike.

        Raises CapabilityError where it is asked for and they are not.
        """
        if not self.options.matches_states:
            return 0.0
        asked = HIDDEN if self.options.hidden is None else self.options.hidden
        states = [answers.run(probe, True)[1] for answers in (self.student, self.teacher)]
        ours, theirs = ([getattr(state, "shape", ()) for state in found] for found in states)
        if ours and ours == theirs and all(shape[:2] == probe.shape for shape in ours):
            return asked
        if self.options.hidden is None:
            return 0.0
        raise CapabilityError(
            f"--hidden {asked:g}: expected blocks whose outputs are alike in both models, found "
            f"{len(ours)} and {len(theirs)} outputs, not of one shape; leave it out"
        )

    def __call__(self, windows: Tensor) -> Tensor:
        """Differentiable; every token of a window is predicted but the first, and others of a text's
        beginning."""
        windows = windows.to(self.device, non_blocking=True)
        states = self.weight > 0
        hidden, ours = self.student.run(windows, states)
        teacher, theirs = self._teach(windows, states)
        hidden, targets = self._predicting(hidden), self._targets(windows)
        loss = summed(hidden, self.student.head, teacher, targets, self.measure)
        if states:
            loss = loss + self.weight * missed_states(ours, theirs)
        return loss

    def _teach(
        self, windows: Tensor, states: bool
    ) -> tuple[tuple[Tensor, Head] | None, tuple[Tensor, ...]]:
        if self.options.loss == "lm" and not states:
            return None, ()
        with torch.no_grad():
            hidden, theirs = self.teacher.run(windows, states)
        return (self._predicting(hidden), self.teacher.head), theirs

    @torch.no_grad()
    def merit(self, held: Tensor) -> Merit:
        """Of `held` [h, w]; the teacher's hidden states are kept from call to call."""
        totals = torch.zeros(3, dtype=torch.float64)
        for n in range(0, len(held), HELD_BATCH):
            windows = held[n : n + HELD_BATCH].to(self.device)
            targets, head = self._targets(windows), self.student.head
            hidden = self._predicting(self.student.run(windows)[0])
            wanted = self._wanted(held, n, windows), self.teacher.head
            found = (
                summed(hidden, head, wanted, targets, kl),
                summed(hidden, head, None, targets, lm),
                summed(wanted[0], self.teacher.head, None, targets, lm),
            )
            totals += torch.stack(found).double().cpu()
        kl_, student, teacher = (totals / (held.shape[0] * self.scored(held.shape[1]))).tolist()
        return Merit(kl_, student, teacher)

    def _wanted(self, held: Tensor, first: int, windows: Tensor) -> Tensor:
        key = id(held), first
        if key in self._kept:
            return self._kept[key]
        hidden = self._predicting(self.teacher.run(windows)[0])
        if self.teacher.plain:  # logits would be too large to keep
            self._kept[key] = hidden
        return hidden

    def _predicting(self, hidden: Tensor) -> Tensor:
        """[m, w, d] -> [m scored(w), d], all but the last and idle ones."""
        return hidden[:, self.idle : -1].flatten(0, 1)

    def _targets(self, windows: Tensor) -> Tensor:
        return windows[:, 1 + self.idle :].flatten()


def _measure(options: HealOptions) -> Measure:
    if options.loss == "lm":
        return lm
    return kl if options.top_k is None else kl_of_top(options.top_k)
