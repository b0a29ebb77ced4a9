"""Layers in few bits on a CPU: one token a sequence by torch's operator, all else as before."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES

from blr.compressor.fitting.rounding import is_latent, plain_fit, round_layer
from blr.compressor.modeling import packed_products
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.specs import (
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.layers.packed.cpu import MOST, has_operator

pytestmark = pytest.mark.skipif(not has_operator(), reason="no such operator for this CPU")
DENSE = DenseSpec(200, 150)  # neither whole groups nor whole tiles of rows
LOW = LowRankSpec(200, 150, 40)
SPECS: dict[str, Spec] = {
    **{f"int4-{group}": QuantizedSpec(DENSE, 4, group) for group in (32, 64, 128)},
    "int3": QuantizedSpec(DENSE, 3, 64, curved=False),
    "int2": QuantizedSpec(DENSE, 2, 32),
    "low": QuantizedSpec(LOW, 4, 32),
    "corrected": CorrectedSpec(
        QuantizedSpec(DENSE, 2, 64), QuantizedSpec(LowRankSpec(200, 150, 5), 4, 64, tiled=True)
    ),
}


def layer(spec: Spec, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A layer of random weights with a bias; scales of a dense one are zero and negative, too."""
    torch.manual_seed(0)
    made = layer_of(spec, True)
    fit = plain_fit(FitOptions())
    found = round_layer(torch.randn(150, 200), spec, None, torch.bfloat16, fit)
    state = {name: tensor for name, tensor in found.items() if not is_latent(name)}
    if "weight_scale" in state:
        state["weight_scale"][0] = 0
        state["weight_scale"][1:9] *= -1
    made.load_state_dict({**state, "bias": torch.randn(150)})
    return made.to(dtype).requires_grad_(False)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, MOST])
@pytest.mark.parametrize("kind", SPECS)
def test_one_token_is_that_of_the_reference(
    kind: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the precision of bfloat16, in which the operator computes."""
    monkeypatch.setattr(packed_products, "SMALL", 0)
    made = layer(SPECS[kind], dtype)
    x = torch.randn(count, 1, 200).to(dtype)
    with torch.inference_mode():
        found, expected = made(x), layer(SPECS[kind]).double()(x.double())
    assert found.dtype == dtype and found.shape == (count, 1, 150)
    parts = made.modules()
    assert [held for part in parts if (held := getattr(part, "cpu_weights", None))]
    assert error(found, expected) < TOLERANCES[torch.bfloat16] / 2


@pytest.mark.parametrize("kind", SPECS)
def test_small_layers_of_a_float32_model_are_exact(kind: str) -> None:
    """They are plain, and what one token gives is what the folder's own file computes."""
    made, x = layer(SPECS[kind]), torch.randn(2, 1, 200)
    with torch.inference_mode():
        found, expected = made(x), layer(SPECS[kind]).double()(x.double())
    assert error(found, expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("shape", [(1, 2, 200), (3, 200), (MOST + 1, 1, 200)], ids=str)
def test_all_else_is_exact(shape: tuple[int, ...]) -> None:
    """Several tokens of a sequence, as of a text that is measured, and rows of unknown kind."""
    made = layer(SPECS["int4-64"])
    x = torch.randn(shape)
    with torch.no_grad():
        found = made(x)
    assert error(found, layer(SPECS["int4-64"]).double()(x.double())) < TOLERANCES[torch.float32]
    assert made.cpu_weights is None


def test_gradients_are_exact() -> None:
    made, x = layer(SPECS["int4-64"]), torch.randn(2, 1, 200, requires_grad=True)
    made(x).sum().backward()
    assert made.cpu_weights is None and x.grad is not None


OTHERS = DENSE, DENSE, MonarchSpec(200, 150, 5, 2)


@pytest.mark.parametrize("spec", [*map(QuantizedSpec, OTHERS, (3, 8, 4), (64, 64, 32))], ids=repr)
def test_what_is_no_code_of_four_bits_is_exact(spec: Spec) -> None:
    x = torch.randn(2, 1, 200)
    with torch.no_grad():
        found = layer(spec)(x)
    assert error(found, layer(spec).double()(x.double())) < TOLERANCES[torch.float32]


def test_weights_that_change_are_read_again() -> None:
    made, x = layer(SPECS["int4-64"]), torch.randn(1, 1, 200)
    with torch.no_grad():
        before = made(x)
        made.weight_scale *= 2
        doubled = made(x)
        made.weight_q = made.weight_q.clone().zero_()
        assert not torch.equal(made(x), doubled)
    assert torch.allclose(doubled - made.bias, 2 * (before - made.bias), atol=1e-6)


def test_nothing_is_held_of_a_layer_on_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLR_KERNELS", "torch")
    made = layer(SPECS["int4-64"])
    with torch.no_grad():
        made(torch.randn(1, 1, 200))
    assert made.cpu_weights is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite(bad: float) -> None:
    """Inputs and scales that are not finite leave their marks where a dense weight leaves them."""
    made, plain = layer(SPECS["int4-64"]), layer(SPECS["int4-64"])
    x = torch.randn(2, 1, 200)
    x[1, 0, 5] = bad
    for each in (made, plain):
        each.weight_scale[20, 1] = bad
    with torch.no_grad():
        found, expected = made(x)[:, 0], plain(x[:, 0])
    assert torch.equal(found.isfinite(), expected.isfinite())
