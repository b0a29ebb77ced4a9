"""Minimizes a function by preconditioned L-BFGS whose steps never go up, for the weighted fits.

Source: Nocedal, "Updating quasi-Newton matrices with limited storage" (1980).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from blr.compressor.base.errors import NumericsError

MEMORY = 10  # correction pairs kept
REFRESH = 10  # rounds between two preconditioners
BACKTRACKS = 10  # step lengths tried before the direction is given up
SHRINK = 0.4
FLOOR = 1e-6  # how far below zero rounding takes a loss, relative to the one before
FIRST_STEP = 0.3  # of the first direction, whose length nothing has calibrated yet

Apply = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor, Tensor]


class Descent(Protocol):
    """A function of one flat vector to minimize; one factor is eliminated exactly at every evaluation
    (variable projection: Golub and Pereyra, 1973)."""

    def evaluate(self, theta: Tensor) -> tuple[float, Tensor]:
        """The loss and its negative gradient at theta [n] (up to one common positive factor)."""

    def preconditioner(self, theta: Tensor) -> Apply:
        """An approximate inverse Hessian at the `theta` evaluated last, which maps flat vectors."""


def descend(problem: Descent, theta: Tensor, rounds: int) -> tuple[Tensor, list[float]]:
    """Minimize `problem` from `theta` [n] by at most `rounds` accepted steps; stops early when no
    direction lowers the loss. Returns the last point and the strictly falling losses, of the start and
    every step."""
    loss, gradient = problem.evaluate(theta)
    losses, pairs = [loss], list[Pair]()
    apply = problem.preconditioner(theta) if rounds else None
    for step in range(rounds):
        if step and step % REFRESH == 0:
            apply = problem.preconditioner(theta)
        assert apply is not None
        found = _line_search(problem, theta, loss, _direction(gradient, pairs, apply))
        if found is None and not pairs:
            break
        if found is None:
            problem.evaluate(theta)  # leave the problem at the accepted point
            pairs = []
            continue
        moved, loss, turned = found
        pairs = [*pairs, *_pair(moved - theta, gradient - turned)][-MEMORY:]
        theta, gradient = moved, turned
        losses.append(loss)
    return theta, losses


def _line_search(
    problem: Descent, theta: Tensor, loss: float, direction: Tensor
) -> tuple[Tensor, float, Tensor] | None:
    """Try ever shorter steps; the point, loss and negative gradient of the first that lowers the loss.
    Along directions that singular inputs never show a step can be so long that only rounding is left of
    sums: then there is no eliminated factor, or a square below zero."""
    length = 1.0
    for _ in range(BACKTRACKS):
        moved = theta + length * direction
        length *= SHRINK
        try:
            new, gradient = problem.evaluate(moved)
        except NumericsError:
            continue
        if -FLOOR * abs(loss) <= new < loss:
            return moved, new, gradient
    return None


def _pair(step: Tensor, change: Tensor) -> list[Pair]:
    """The correction pair of a step, unless the curvature along it is not positive."""
    curvature = torch.dot(step, change)
    return [(step, change, 1 / curvature)] if curvature > 0 else []


def _direction(gradient: Tensor, pairs: list[Pair], apply: Apply) -> Tensor:
    """The L-BFGS two-loop recursion with `apply` as initial inverse Hessian."""
    weights = []
    for step, change, rho in reversed(pairs):
        weights.append(rho * torch.dot(step, gradient))
        gradient = gradient - weights[-1] * change
    direction = apply(gradient)
    if not pairs:
        return FIRST_STEP * direction
    _, change, rho = pairs[-1]
    direction = direction / (rho * torch.dot(change, apply(change)))
    for (step, change, rho), weight in zip(pairs, reversed(weights), strict=True):
        direction = direction + (weight - rho * torch.dot(change, direction)) * step
    return direction
