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
from blr.kernels.layers.kronecker import permute, products, variants
from blr.kernels.layers.kronecker.reference import kronecker_factor as reference
from blr.kernels.layers.kronecker.reference import kronecker_linear
from blr.kernels.layers.kronecker.variants import VARIANTS, kronecker_factor

pytest.importorskip("triton")
from blr.kernels.layers.kronecker.triton import densify

STORED = order_of("factors", 4)
PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (2, 20, 36, 4), (1, 18, 12, 16), (2, 33, 17, 2)]
SMALL_PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (1, 20, 12, 8)]
SMALL = {"BN": 16, "BB": 16, "BC": 16}
DEFAULTS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "fused": {"variant": "fused"},
    "permute": {"variant": "permute"},
    "blocks": {"variant": "blocks"},
    "split": {"variant": "split"},
}
TILED: dict[str, dict[str, Any]] = {
    "permute small tiles": {"variant": "permute", "BN": 8, "BM": 8, "BD": 2},
    "split small tiles": {"variant": "split", "BN": 16, "BM": 4, "BD": 4},
    "plain": {"variant": "fused", "path": "plain", **SMALL},
    "plain side by side": {"variant": "fused", "path": "plain", "GROUP_N": 4, **SMALL},
    "grouped 1": {"variant": "fused", "path": "grouped", "G": 1, **SMALL},
    "grouped 4": {"variant": "fused", "path": "grouped", "G": 4, **SMALL},
    "grouped 8": {"variant": "fused", "path": "grouped", "G": 8, "GROUP_N": 2, **SMALL},
}
ONCE = ("plain side by side", "grouped 1", "permute small tiles", "split small tiles")
ARMS = {**DEFAULTS, **TILED}
CASES = [
    *[(arm, pattern, 17) for arm in DEFAULTS for pattern in PATTERNS],
    *[(arm, pattern, 3) for arm in ("chosen", "fused", "permute") for pattern in PATTERNS[:2]],
    *[(arm, pattern, 17) for arm in TILED for pattern in SMALL_PATTERNS[-1 if arm in ONCE else 0 :]],
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


@pytest.mark.parametrize("arm", ["fused", "permute", "split", "plain", "grouped 4"])
def test_batch_over_several_tiles(arm: str) -> None:
    x, w, bias, expected = problem((2, 6, 9, 3), 129)
    assert_near(kronecker_factor(x, w, bias=bias, **ARMS[arm]), expected, torch.float32)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("pattern", SMALL_PATTERNS, ids=str)
def test_few_rows_take_the_decode_path(pattern: tuple[int, int, int, int], n: int) -> None:
    x, w, bias, expected = problem(pattern, n)
    assert_near(kronecker_factor(x, w, bias=bias), expected, torch.float32)


@pytest.mark.parametrize("n", [5, 8])
def test_decode_path_serves_up_to_eight_rows(n: int) -> None:
    x, w, bias, expected = problem((4, 33, 17, 2), n)
    config = {"path": "decode", "BB": 8, "BC": 16}
    assert_near(kronecker_factor(x, w, bias=bias, variant="fused", **config), expected, torch.float32)


@dtypes
def test_dense_blocks_equal_the_factor(dtype: torch.dtype) -> None:
    x, w, bias, expected = problem((2, 6, 9, 8), 17, dtype)
    config = {"variant": "fused", "path": "dense", **SMALL}
    assert_near(kronecker_factor(x, w, bias=bias, **config), expected, dtype)


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


@pytest.mark.parametrize("arm", ["fused", "permute", "blocks", "split", "plain", "grouped 4"])
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
    assert torch.equal(kronecker_factor(x, w, variant="fused"), reference(x, w))


def test_errors_name_shapes_and_dtypes() -> None:
    x, w = torch.randn(3, 10), torch.randn(1, 3, 5, 2)
    with pytest.raises(ValueError, match=r"\[3, 9\].*expected"):
        kronecker_factor(x[:, :9], w)
    with pytest.raises(ValueError, match="float16"):
        kronecker_factor(x, w.half())


@pytest.mark.parametrize(("enabled", "used"), [(True, True), (False, True), (True, False)])
def test_tf32_is_asked_for_and_put_back(enabled: bool, used: bool) -> None:
    before = products.torch_tf32()
    with products.cublas_tf32(enabled):
        with products.cublas_tf32(used):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32" or not used
            assert products.torch_tf32() == used
        assert products.torch_tf32() == enabled
    assert products.torch_tf32() == before
    assert torch.backends.cuda.matmul.allow_tf32 == before  # the old way can still be read


def low_bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32) & 0x1FFF


def test_parts_are_exact_in_tf32_and_sum_to_fp32() -> None:
    """What the tensor core drops of its operands is zero, so the CPU computes the same products."""
    x = torch.randn(5, 64) * 10.0 ** torch.randint(-20, 20, (5, 64))
    hi, lo, again = permute.gather_parts(x, 1, 1, permute.HI_LO_HI).view(5, 3, 64).unbind(1)
    assert not low_bits(hi).any()
    assert not low_bits(lo).any()
    assert torch.equal(hi, again)
    assert ((x.double() - hi).abs() <= 2.0**-11 * x.abs()).all()  # to nearest
    assert ((x.double() - hi - lo).abs() <= 2.0**-22 * x.abs()).all()
    hi2, again, lo2 = permute.gather_parts(x, 1, 1, permute.HI_HI_LO).view(5, 3, 64).unbind(1)
    assert all(torch.equal(*pair) for pair in ((hi, hi2), (hi, again), (lo, lo2)))


@pytest.mark.filterwarnings("ignore:invalid value")  # ∞ - ∞, in the interpreter's NumPy
def test_parts_keep_infinities_and_nan() -> None:
    inf, nan = float("inf"), torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).item()
    x = torch.tensor([[inf, -inf, nan, 0.0, -0.0, 1.0]])
    hi, lo, _ = permute.gather_parts(x, 1, 1, permute.HI_LO_HI).view(3, 6)
    assert torch.equal(hi.nan_to_num(7.0), x[0].nan_to_num(7.0))
    assert hi.isnan().tolist() == x[0].isnan().tolist()
    assert not lo.any()


def test_split_has_the_error_of_fp32_where_one_tf32_product_has_not() -> None:
    x, w, bias, expected = problem((1, 32, 1024, 1), 16)
    y = kronecker_factor(x, w, bias=bias, variant="split")
    assert_near(y, expected, torch.float32)
    hi = permute.gather_parts(x, 1, 1, permute.HI_LO_HI)[0, :, :1024]
    rounded = reference(hi.double(), w.double()) + bias.double()
    assert (rounded - expected).norm() / expected.norm() > 10 * TOLERANCES[torch.float32]


def test_split_is_chosen_by_itself_but_not_where_torch_takes_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(variants, "split_factor", lambda x, w, out, *_, **__: ran.append("split") or out)
    monkeypatch.setattr(
        variants, "permute_factor", lambda x, w, out, *_, **__: ran.append("permute") or out
    )
    x, w = torch.empty(1).expand(4096, 1024 * 4), torch.empty(1).expand(1, 1024, 1024, 4)
    for enabled in (False, True, False):
        with products.cublas_tf32(enabled):
            kronecker_factor(x, w)
    assert ran == ["split", "permute", "split"]
