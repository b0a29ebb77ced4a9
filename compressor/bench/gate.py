"""No time without the right numbers: every arm's output against float64, on some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

ROWS = 32  # of the output that are compared, first and last among them


class WrongResult(Exception):
    """An arm computes something else; `error` is relative, NaN if the output was not all written."""

    def __init__(self, error: float) -> None:
        misshapen = "not all written, not finite or of another shape"
        super().__init__(f"relative error {error:.2g}" if isfinite(error) else misshapen)
        self.error = error


@dataclass(frozen=True)
class Expected:
    """Rows [k] of the output and their right values [k, o]; `last` marks outputs of [o, n]."""

    rows: Tensor
    values: Tensor
    last: bool = False

    def error(self, y: Tensor) -> float:
        """Relative Frobenius error of the rows; NaN if anything of `y` is no finite number or its
        shape is another."""
        y = y.mT if self.last else y
        if y.ndim != 2 or y.shape[1] != self.values.shape[1] or y.shape[0] <= int(self.rows.max()):
            return float("nan")
        if not bool(y.sum(dtype=torch.float32).isfinite()):
            return float("nan")
        lost = y[self.rows].to(self.values.dtype) - self.values
        return float(lost.norm() / self.values.norm())


def expect(
    reference: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], last: bool = False
) -> Expected:
    """What `reference(x, *weights)`, x [n, i], gives in float64 on `ROWS` rows spread over all; with
    `last` for x [i, n]."""
    x = x.mT if last else x
    rows = torch.linspace(0, len(x) - 1, min(ROWS, len(x)), device=x.device).round().long()
    wide = (w.double() if w.is_floating_point() else w for w in weights)
    return Expected(rows, reference(x[rows].double(), *wide), last)


def check(y: Tensor, expected: Expected, limit: float) -> float:
    """The error of `y`. Raises WrongResult above `limit` and for NaN."""
    error = expected.error(y)
    if not error <= limit:
        raise WrongResult(error)
    return error


def poisoned(call: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Tensor:
    """The second result of `call`, after the memory of the first was filled with NaN and freed: a
    caching allocator hands it out again, so that an element never written shows."""
    first = call(*arguments)
    own = {tensor.data_ptr() for tensor in arguments if tensor.layout is torch.strided}
    if first.data_ptr() not in own:
        first.fill_(float("nan"))
    del first
    return call(*arguments)
