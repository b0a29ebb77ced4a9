"""Every kernel and variant of Kronecker-sparse factors against float64, interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.common.layout import relaid
from blr.kernels.common.orders import order_of
from blr.kernels.layers.kronecker import permute
from blr.kernels.layers.kronecker.reference import kronecker_factor as reference
from blr.kernels.layers.kronecker.reference import kronecker_linear
from blr.kernels.layers.kronecker.variants import VARIANTS, kronecker_factor

pytest.importorskip("triton")
from blr.kernels.layers.kronecker.triton import densify

STORED = order_of("factors", 4)
PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (2, 20, 36, 4), (1, 18, 12, 16), (2, 33, 17, 2)]
SMALL_PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (1, 20, 12, 8)]
ARMS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "decode": {"variant": "decode"},
    "permute": {"variant": "permute"},
    "blocks": {"variant": "blocks"},
}
ROWS = {arm: 8 if arm.startswith("decode") else 17 for arm in ARMS}
CASES = [
    *[(arm, pattern, ROWS[arm]) for arm in ARMS for pattern in PATTERNS],
    *[(arm, pattern, 3) for arm in ("chosen", "decode", "permute") for pattern in PATTERNS[:2]],
]
CHAINS = {
    "ViT square": [(1, 24, 6, 2), (2, 6, 24, 1)],
    "butterfly": [(1, 2, 2, 8), (2, 2, 2, 4), (4, 2, 2, 2), (8, 2, 2, 1)],
    "odd": [(1, 5, 7, 6), (2, 21, 4, 1)],
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every buffer the launchers allocate starts as NaN, so an element nobody writes shows."""
    allocate = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: allocate(*a, **k).fill_(float("nan")))
    yield


def problem(
    pattern: tuple[int, int, int, int], n: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [n, acd], w stored [a, d, b, c], bias and the result in float64."""
    a, b, c, d = pattern
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, a * c * d, generator=g).to(dtype)
    w = relaid((torch.randn(pattern, generator=g) / c**0.5).to(dtype), STORED)
    bias = torch.randn(a * b * d, generator=g).to(dtype)
    return x, w, bias, reference(x.double(), w.double()) + bias.double()


def assert_near(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert y.shape == expected.shape
    assert y.dtype == dtype
    error = (y.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCES[dtype], f"relative error {error:.1e}"


@pytest.mark.sampled(3)
@dtypes
@pytest.mark.parametrize(("arm", "pattern", "n"), CASES, ids=str)
def test_equals_float64(
    arm: str, pattern: tuple[int, int, int, int], n: int, dtype: torch.dtype
) -> None:
    x, w, bias, expected = problem(pattern, n, dtype)
    y = kronecker_factor(x, w, bias=bias, **ARMS[arm])
    assert y.is_contiguous()
    assert_near(y, expected, dtype)


@pytest.mark.parametrize("arm", ["permute", "blocks"])
def test_batch_over_several_tiles(arm: str) -> None:
    x, w, bias, expected = problem((2, 6, 9, 3), 129)
    assert_near(kronecker_factor(x, w, bias=bias, **ARMS[arm]), expected, torch.float32)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("pattern", SMALL_PATTERNS, ids=str)
def test_few_rows_take_the_decode_path(pattern: tuple[int, int, int, int], n: int) -> None:
    x, w, bias, expected = problem(pattern, n)
    assert_near(kronecker_factor(x, w, bias=bias), expected, torch.float32)


@dtypes
def test_weight_of_all_columns_is_made_in_one_launch(dtype: torch.dtype) -> None:
    for pattern in [(2, 6, 9, 8), (3, 5, 70, 3), (1, 33, 4, 5)]:
        a, b, c, d = pattern
        w = torch.randn(pattern).to(dtype)
        expected = torch.diag_embed(w).permute(0, 1, 3, 2, 4).reshape(a, b * d, c * d)
        assert torch.equal(densify(w), expected)
        assert torch.equal(densify(relaid(w, STORED)), expected)


@pytest.mark.parametrize("a", [1, 2])
def test_blocks_permute_nothing(a: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias, expected = problem((a, 6, 9, 4), 17)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(permute, "launch", refuse)
    assert_near(kronecker_factor(x, w, bias=bias, variant="blocks"), expected, torch.float32)


@pytest.mark.parametrize("arm", ["decode", "permute", "blocks"])
def test_any_strides_of_input_and_weight(arm: str) -> None:
    x, w, bias, expected = problem((2, 6, 9, 3), 5)
    padded = torch.full((10, x.shape[1] + 3), float("nan"))
    padded[::2, 1:-2] = x
    canonical = w.contiguous()
    assert canonical.stride(3) == 1
    got = kronecker_factor(padded[::2, 1:-2], canonical, bias=bias, **ARMS[arm])
    assert_near(got, expected, torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chain", CHAINS)
def test_chains(chain: str, variant: str) -> None:
    g = torch.Generator().manual_seed(3)
    factors = [torch.randn(p, generator=g) / p[2] ** 0.5 for p in CHAINS[chain]]
    a, b, c, d = CHAINS[chain][-1]
    x = torch.randn(5, a * c * d, generator=g)
    a, b, c, d = CHAINS[chain][0]
    bias = torch.randn(a * b * d, generator=g)
    expected = kronecker_linear(x.double(), [w.double() for w in factors], bias.double())
    y = VARIANTS[variant](x, factors, bias=bias)
    assert y.is_contiguous()
    assert_near(y, expected, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_batch(variant: str) -> None:
    assert VARIANTS[variant](torch.randn(0, 10), [torch.randn(1, 3, 5, 2)]).shape == (0, 6)


def test_float64_takes_plain_torch() -> None:
    x, w = torch.randn(3, 10, dtype=torch.float64), torch.randn(1, 3, 5, 2, dtype=torch.float64)
    assert torch.equal(kronecker_factor(x, w, variant="blocks"), reference(x, w))


def test_errors_name_shapes_and_dtypes() -> None:
    x, w = torch.randn(3, 10), torch.randn(1, 3, 5, 2)
    with pytest.raises(ValueError, match=r"\[3, 9\].*expected"):
        kronecker_factor(x[:, :9], w)
    with pytest.raises(ValueError, match="float16"):
        kronecker_factor(x, w.half())
