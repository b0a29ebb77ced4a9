"""W ≈ Q + S: weights on a coarse grid and a structured correction of what that loses.

The start of the joint refit: Q rounds W − S behind error compensation, S is the structure nearest to
W − Q in the metric of the inputs, in turn. Sources: LoftQ (arXiv 2310.08659) for the alternation, here
in the metric of the inputs and with the factors of S rounded as they are stored; GPTQ for Q.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blr.compressor.rounding.gptq import Rounded, compensation, gptq

ROUNDS = 4

Fit = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def corrected(
    weight: Tensor,
    gram: Tensor,
    bits: int,
    group: int,
    fit: Fit,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Rounded, dict[str, Tensor]]:
    """Q and the tensors of S, the best of `ROUNDS` alternations by the error of the layer's output.

    Args:
        weight: W [o, i], float64. gram: H [i, i], float64.
        bits, group, scale_dtype: of Q's grid.
        fit: the tensors of the structure nearest to a matrix [o, i], and what they multiply out to as
            they are stored.
    """
    root = compensation(gram)
    correction = torch.zeros_like(weight)
    best: tuple[Rounded, dict[str, Tensor]] | None = None
    least = float("inf")
    for _ in range(ROUNDS):
        base = gptq(weight - correction, root, bits, group, scale_dtype)
        tensors, correction = fit(weight - base.value)
        missed = weight - base.value - correction
        error = float(((missed @ gram) * missed).sum())
        if best is None or error < least:
            best, least = (base, tensors), error
    assert best is not None
    return best
