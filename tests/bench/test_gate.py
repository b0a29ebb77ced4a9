"""No time for wrong numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blr.bench.checks import (
    PRECISIONS,
    ROWS,
    Expected,
    WrongResult,
    computing_in,
    expect,
    find_precision,
    poisoned,
    within,
)
from blr.compressor.base.errors import UsageError

pytestmark = pytest.mark.fast

linear = torch.nn.functional.linear


def check(y: Tensor, expected: Expected, limit: float) -> float:
    return within(expected.error(y), limit)


ROWS_IN, INPUTS, OUTPUTS = 70, 512, 256


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS_IN, INPUTS, generator=random, dtype=torch.float64)
    w = torch.randn(OUTPUTS, INPUTS, generator=random, dtype=torch.float64) / INPUTS**0.5
    return x.to(dtype), w.to(dtype)


@pytest.mark.parametrize("name", PRECISIONS)
def test_right_results_pass_and_a_wrong_tile_does_not(name: str) -> None:
    precision = PRECISIONS[name]
    x, w = data(precision.dtype)
    expected = expect(linear, x, (w,))
    assert len(expected.rows) == ROWS
    assert {0, ROWS_IN - 1} <= set(expected.rows.tolist())
    y = linear(x, w)
    assert check(y, expected, precision.gate) <= precision.gate / 2
    y[:, -1] = y[:, 0]
    with pytest.raises(WrongResult, match="relative error"):
        check(y, expected, precision.gate)


def test_reduced_precision_is_wrong_in_float32() -> None:
    """TF32 keeps 10 bits of mantissa: it must not be timed as float32."""
    x, w = data(torch.float32)
    truncated = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    expected = expect(linear, x, (w,))
    assert check(linear(truncated, w), expected, PRECISIONS["tf32"].gate) > 1e-4
    with pytest.raises(WrongResult):
        check(linear(truncated, w), expected, PRECISIONS["float32"].gate)


SPOILERS = {
    "columns": lambda y: y[:, :-1],
    "rows": lambda y: y[:1],
    "nan": lambda y: y.index_fill(0, torch.tensor([1]), math.nan),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_shape_and_every_element_count(spoil: Callable[[Tensor], Tensor]) -> None:
    """Row 1 is none of the compared rows: NaN anywhere is found."""
    x, w = data(torch.float32)
    expected = expect(linear, x, (w,))
    assert 1 not in expected.rows
    with pytest.raises(WrongResult, match="not all written, not finite or of another shape"):
        check(spoil(linear(x, w)), expected, 1.0)


def test_an_output_not_all_written_is_wrong() -> None:
    x, w = data(torch.float32)
    expected = expect(linear, x, (w,))

    def lazy(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(ROWS_IN, OUTPUTS)
        y[:, : OUTPUTS // 2] = linear(x, w[: OUTPUTS // 2])
        return y

    with pytest.raises(WrongResult):
        check(poisoned(lazy, (x, w)), expected, PRECISIONS["float32"].gate)


def test_poison_spares_arguments() -> None:
    x = torch.ones(4, 4)
    assert torch.equal(poisoned(lambda x: x, (x,)), torch.ones(4, 4))


def test_precision_decides_about_tf32_only_while_active() -> None:
    before = torch.get_float32_matmul_precision()
    for name, expected in (("tf32", "high"), ("float32", "highest")):
        with computing_in(find_precision(name)):
            assert torch.get_float32_matmul_precision() == expected
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(UsageError, match="expected one of float32, tf32"):
        find_precision("fp8")
