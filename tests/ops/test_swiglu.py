"""The dual-U SwiGLU kernel and its single form compute what plain torch does in float64.

Numbers come from Triton's interpreter: float32 and float16 (its bfloat16 dots are meaningless).
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported; conftest.py does it as well

from typing import Any

import pytest
import torch
from recording import Recorder
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.swiglu import reference
from blr.kernels.swiglu.triton import activated_projection, gated_projection

# exp(-x) of a large negative x is inf in the interpreter's numpy too, and the sigmoid 0 as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

MODULE = "blr.kernels.swiglu.triton"
DTYPES = [torch.float32, torch.float16]
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may use, by compute capability


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty is NaN: what is not written shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        tensor = empty(*size, **options)
        return tensor if tensor.is_meta else tensor.fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def operands(n: int, f: int, rg: int, ru: int, dtype: torch.dtype) -> list[Tensor]:
    """zg, Ug, bg, zu, Uu, bu; zg and zu are columns of one tensor, Uu is stored transposed."""
    torch.manual_seed(n + rg)
    z = torch.randn(n, rg + ru)
    parts = [
        z[:, :rg],
        torch.randn(f, rg),
        torch.randn(f),
        z[:, rg:],
        torch.randn(ru, f).T,
        torch.randn(f),
    ]
    return [t.to(dtype) for t in parts]


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    if found.numel():
        assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
@pytest.mark.parametrize("absent", [(), (2,), (5,), (2, 5)], ids=["both", "up", "gate", "plain"])
def test_gated(dtype: torch.dtype, act: str, absent: tuple[int, ...]) -> None:
    """With either bias, both or none."""
    for n, f, rg, ru in [(0, 5, 3, 3), (1, 33, 7, 20), (17, 130, 40, 9), (129, 11, 5, 64)]:
        parts = operands(n, f, rg, ru, dtype)
        parts = [None if at in absent else t for at, t in enumerate(parts)]
        double = [None if t is None else t.double() for t in parts]
        check(gated_projection(*parts, act), reference.gated_projection(*double, act), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_single(dtype: torch.dtype, act: str) -> None:
    for n, f, r in [(0, 5, 3), (1, 33, 7), (3, 20, 130), (129, 11, 64)]:
        for parts in (operands(n, f, r, 4, dtype)[:3], operands(n, f, 4, r, dtype)[3:]):
            double = [t.double() for t in parts]
            check(activated_projection(*parts, act), reference.activated_projection(*double, act), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_sizes_change_nothing_but_time(dtype: torch.dtype) -> None:
    """Several tiles along every axis, K loops of different length, incomplete groups."""
    config = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 3}
    for rg, ru in [(50, 32), (32, 50)]:
        parts = operands(90, 100, rg, ru, dtype)
        double = [t.double() for t in parts]
        expected = reference.gated_projection(*double, "silu")
        check(gated_projection(*parts, "silu", **config), expected, dtype)
    single = activated_projection(*parts[:3], "gelu", **config)
    check(single, reference.activated_projection(*double[:3], "gelu"), dtype)


@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_activations_where_they_bend(act: str) -> None:
    """Arguments in [-4, 4], where a wrong constant shows; beyond, all of them are 0 or x."""
    z = torch.linspace(-4, 4, 33)[:, None]
    one = torch.ones(1, 1)
    expected = reference.activated_projection(z.double(), one.double(), None, act)
    check(activated_projection(z, one, None, act), expected, z.dtype)


@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_large_arguments_stay_finite(act: str) -> None:
    """Both tails of every activation: no overflow in an exponential, no inf times 0."""
    z = torch.tensor([[-3e4], [-50.0], [0.0], [50.0], [3e4]])
    found = activated_projection(z, torch.ones(1, 1), None, act)
    assert found.isfinite().all()
    check(
        found, reference.activated_projection(z.double(), torch.ones(1, 1).double(), None, act), z.dtype
    )


@pytest.mark.parametrize("module", [reference, None], ids=["reference", "triton"])
def test_unknown_activation_is_refused(module: Any) -> None:
    z, u = torch.randn(2, 3), torch.randn(4, 3)
    single = module.activated_projection if module else activated_projection
    with pytest.raises(ValueError, match=r"swish.*expected one of silu"):
        single(z, u, None, "swish")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("gated, act", [(True, "silu"), (False, "gelu"), (False, "gelu_tanh")])
def test_default_configuration_compiles_without_spills(
    gated: bool, act: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n=4096, r=1488, f=11008, bf16: two accumulators fit the registers; wgmma on sm_90."""
    for module in (MODULE, "blr.kernels.monarch.staged"):
        monkeypatch.setattr(f"{module}.shared_limit", lambda device: SHARED[capability])
    recorder = Recorder(monkeypatch, MODULE, "projection_kernel")
    make = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")  # noqa: E731
    z, u, b = make(4096, 2976), make(11008, 1488), make(11008)
    if gated:
        gated_projection(z[:, :1488], u, b, z[:, 1488:], u, b, act)
    else:
        activated_projection(z[:, :1488], u, b, act)
    made = recorder.compile(0, capability)
    assert made["spills"] == 0
    assert made["shared"] <= SHARED[capability]
    assert "cp.async" in made["asm"]["ptx"]
    assert ("wgmma" in made["asm"]["ptx"]) == (capability == 90)
