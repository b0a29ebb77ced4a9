"""Every kernel and variant of Kronecker-sparse factors against float64, interpreted on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.errors import UsageError
from blr.kernels.kronecker import choose, variants
from blr.kernels.kronecker.reference import kronecker_factor as reference
from blr.kernels.kronecker.reference import kronecker_linear
from blr.kernels.kronecker.variants import VARIANTS, densify, kronecker_chain, kronecker_factor, relayout

pytest.importorskip("triton")

PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (3, 48, 64, 4), (1, 64, 48, 16), (4, 33, 17, 2)]
SMALL_PATTERNS = [(1, 3, 5, 1), (2, 6, 9, 3), (1, 20, 12, 16), (2, 33, 17, 2), (1, 5, 18, 6)]
SMALL = {"BN": 16, "BB": 16, "BC": 16}
DEFAULTS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "fused": {"variant": "fused"},
    "permute": {"variant": "permute"},
    "bmm": {"variant": "bmm"},
}
TILED: dict[str, dict[str, Any]] = {
    "permute small tiles": {"variant": "permute", "BN": 8, "BM": 8, "BD": 2},
    "plain": {"variant": "fused", "path": "plain", **SMALL},
    "plain side by side": {"variant": "fused", "path": "plain", "GROUP_N": 4, **SMALL},
    "grouped 1": {"variant": "fused", "path": "grouped", "G": 1, **SMALL},
    "grouped 4": {"variant": "fused", "path": "grouped", "G": 4, **SMALL},
    "grouped 8": {"variant": "fused", "path": "grouped", "G": 8, "GROUP_N": 2, **SMALL},
}
ARMS = {**DEFAULTS, **TILED}
CASES = [
    *[(arm, pattern, n) for arm in DEFAULTS for pattern in PATTERNS for n in (3, 17)],
    *[(arm, pattern, n) for arm in TILED for pattern in SMALL_PATTERNS for n in (1, 17)],
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
    w = relayout((torch.randn(pattern, generator=g) / c**0.5).to(dtype))
    bias = torch.randn(a * b * d, generator=g).to(dtype)
    return x, w, bias, reference(x.double(), w.double()) + bias.double()


def assert_near(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert y.shape == expected.shape
    assert y.dtype == dtype
    error = (y.double() - expected).norm() / expected.norm()
    assert error <= TOLERANCES[dtype], f"relative error {error:.1e}"


@dtypes
@pytest.mark.parametrize("batch_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("arm", "pattern", "n"), CASES, ids=str)
def test_equals_float64(
    arm: str, pattern: tuple[int, int, int, int], n: int, batch_last: bool, dtype: torch.dtype
) -> None:
    x, w, bias, expected = problem(pattern, n, dtype)
    x = x.t().contiguous() if batch_last else x
    y = kronecker_factor(x, w, bias=bias, batch_last=batch_last, **ARMS[arm])
    assert y.is_contiguous()
    assert_near(y.t() if batch_last else y, expected, dtype)


@pytest.mark.parametrize("arm", ["fused", "permute", "plain", "grouped 4"])
def test_batch_over_several_tiles(arm: str) -> None:
    x, w, bias, expected = problem((2, 6, 9, 3), 129)
    assert_near(kronecker_factor(x, w, bias=bias, **ARMS[arm]), expected, torch.float32)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("pattern", SMALL_PATTERNS, ids=str)
@pytest.mark.parametrize("batch_last", [False, True], ids=["first", "last"])
def test_few_rows_take_the_decode_path(
    batch_last: bool, pattern: tuple[int, int, int, int], n: int
) -> None:
    x, w, bias, expected = problem(pattern, n)
    y = kronecker_factor(x.t() if batch_last else x, w, bias=bias, batch_last=batch_last)
    assert_near(y.t() if batch_last else y, expected, torch.float32)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_decode_path_serves_up_to_eight_rows(n: int) -> None:
    x, w, bias, expected = problem((4, 33, 17, 2), n)
    config = {"path": "decode", "BB": 8, "BC": 16}
    assert_near(kronecker_factor(x, w, bias=bias, variant="fused", **config), expected, torch.float32)


@dtypes
@pytest.mark.parametrize("G", [1, 2, 4, 8])
def test_densified_run_equals_factor(G: int, dtype: torch.dtype) -> None:
    x, w, bias, expected = problem((2, 6, 9, 8), 17, dtype)
    config = {"variant": "fused", "path": "dense", "G": G, **SMALL}
    cached = kronecker_factor(x, w, bias=bias, prepared=densify(w, G), **config)
    assert_near(cached, expected, dtype)
    assert torch.equal(kronecker_factor(x, w, bias=bias, **config), cached)


def test_densify_places_every_weight_on_the_diagonal_of_its_run() -> None:
    w = torch.arange(1.0, 1 + 2 * 3 * 5 * 4).view(2, 3, 5, 4)
    dense = densify(w, 2)
    assert dense.shape == (2, 6, 10, 2)
    assert dense.stride(2) == 1
    blocks = dense.reshape(2, 3, 2, 5, 2, 2)  # [a, b, g, c, g', run]
    assert torch.equal(blocks[:, :, 1, :, 1, 1], w[..., 3])
    assert blocks[:, :, 0, :, 1].count_nonzero() == 0
    with pytest.raises(UsageError, match="divisor"):
        densify(w, 3)


@pytest.mark.parametrize("arm", ["fused", "permute", "plain", "grouped 4"])
def test_any_strides_of_input_and_weight(arm: str) -> None:
    x, w, bias, expected = problem((2, 6, 9, 3), 5)
    padded = torch.full((10, x.shape[1] + 3), float("nan"))
    padded[::2, 1:-2] = x
    canonical = w.contiguous()
    assert canonical.stride(3) == 1
    got = kronecker_factor(padded[::2, 1:-2], canonical, bias=bias, **ARMS[arm])
    assert_near(got, expected, torch.float32)


@pytest.mark.parametrize("intermediate", ["batch_first", "batch_last"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chain", CHAINS)
def test_chains(chain: str, variant: str, intermediate: str) -> None:
    g = torch.Generator().manual_seed(3)
    factors = [torch.randn(p, generator=g) / p[2] ** 0.5 for p in CHAINS[chain]]
    a, b, c, d = CHAINS[chain][-1]
    x = torch.randn(5, a * c * d, generator=g)
    a, b, c, d = CHAINS[chain][0]
    bias = torch.randn(a * b * d, generator=g)
    expected = kronecker_linear(x.double(), [w.double() for w in factors], bias.double())
    y = VARIANTS[variant](x, factors, bias=bias, intermediate=intermediate)
    assert y.is_contiguous()
    assert_near(y, expected, torch.float32)


def test_chain_takes_a_configuration_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    run = variants.fused_factor

    def spy(x: Tensor, w: Tensor, *rest: Any, **config: Any) -> Tensor:
        seen.append((w.shape[3], config["path"]))
        return run(x, w, *rest, **config)

    monkeypatch.setattr(variants, "fused_factor", spy)
    factors = [torch.randn(p) for p in CHAINS["ViT square"]]
    configs = [{"path": "grouped", "G": 2, **SMALL}, {"path": "plain", **SMALL}]
    kronecker_chain(torch.randn(3, 48), factors, variant="fused", configs=configs)
    assert seen == [(1, "plain"), (2, "grouped")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_batch(variant: str) -> None:
    assert VARIANTS[variant](torch.randn(0, 10), [torch.randn(1, 3, 5, 2)]).shape == (0, 6)


def test_float64_takes_plain_torch() -> None:
    x, w = torch.randn(3, 10, dtype=torch.float64), torch.randn(1, 3, 5, 2, dtype=torch.float64)
    assert torch.equal(kronecker_factor(x, w, variant="fused"), reference(x, w))


def test_errors_name_shapes_dtypes_and_precision() -> None:
    x, w = torch.randn(3, 10), torch.randn(1, 3, 5, 2)
    with pytest.raises(UsageError, match=r"\[3, 9\].*expected"):
        kronecker_factor(x[:, :9], w)
    with pytest.raises(UsageError, match="float16"):
        kronecker_factor(x, w.half())
    with pytest.raises(UsageError, match="tf32x3"):
        kronecker_factor(x, w, precision="fp8")


@pytest.mark.parametrize(
    ("enabled", "asked", "used"), [(True, None, True), (False, True, True), (True, False, False)]
)
def test_tf32_follows_the_argument_and_else_torch(enabled: bool, asked: bool | None, used: bool) -> None:
    before = variants.torch_tf32()
    with variants.cublas_tf32(enabled):
        assert variants.precision_of(asked, None) == ("tf32" if used else "ieee")
        with variants.cublas_tf32(used):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32" or not used
            assert variants.torch_tf32() == used
        assert variants.torch_tf32() == enabled
    assert variants.torch_tf32() == before
    assert torch.backends.cuda.matmul.allow_tf32 == before  # the old way can still be read


class TestChoice:
    """The predictor and the roofline."""

    def test_predictor(self) -> None:
        assert choose.h(64, 64) == pytest.approx(1 / 32)
        assert choose.h(256, 1024) < choose.h(256, 256)

    @pytest.mark.parametrize("kind", choose.H_THRESHOLDS)
    def test_small_blocks_are_fused(self, kind: str) -> None:
        variant, config = choose.choose(choose.Problem(4, 48, 64, 16, 25088, kind))
        assert (variant, config["path"]) == ("fused", "grouped")

    def test_threshold_is_a_parameter(self) -> None:
        large = choose.Problem(1, 1024, 1024, 4, 25088, "fp32")
        assert choose.choose(large)[0] == "permute"
        assert choose.choose(large, thresholds={"fp32": 0.0})[0] == "fused"

    def test_large_block_diagonal_goes_to_cublas(self) -> None:
        assert choose.choose(choose.Problem(4, 1024, 1024, 1, 25088, "half"))[0] == "permute"

    @pytest.mark.parametrize("n", [1, 2, 3, 100000])
    @pytest.mark.parametrize("pattern", [*PATTERNS, (1, 1024, 1024, 128), (128, 48, 48, 64)], ids=str)
    @pytest.mark.parametrize("kind", choose.H_THRESHOLDS)
    def test_tiles_are_powers_of_two_and_fit_registers(
        self, kind: str, pattern: tuple[int, int, int, int], n: int
    ) -> None:
        for machine in (choose.H200, choose.A100):
            config = choose.fused_config(choose.Problem(*pattern, n, kind), machine)
            tile = [v for k, v in config.items() if k in ("G", "BN", "BB", "BC", "num_warps")]
            assert all(v & (v - 1) == 0 for v in tile)
            assert config["path"] == ("decode" if n <= 2 else config["path"])
            if config["path"] != "decode":
                sums = config["G"] * config["BN"] * config["BB"]
                assert sums <= 64 * 32 * config["num_warps"]

    def test_arithmetic_and_traffic_raise_the_estimate(self) -> None:
        p = choose.Problem(2, 256, 256, 4, 4096, "half")
        config = choose.fused_config(p)
        twice = choose.Problem(2, 256, 256, 4, 8192, "half")
        assert choose.fused_seconds(twice, config) > 1.8 * choose.fused_seconds(p, config)
        assert choose.permute_seconds(twice) > 1.8 * choose.permute_seconds(p)
