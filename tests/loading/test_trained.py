"""Models in training by fused rotations and gates: the same answers and gradients in whole models; the
native functions wherever they are to compute."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from blr.compressor.modeling import fused as trained
from blr.compressor.modeling.fused import fuse, fuse_trained

IDS = torch.arange(14).view(2, 7)
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SIZES = {
    **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}
Found = tuple[Tensor, list[Tensor]]


def model_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=None, **more)
    return getattr(transformers, f"{name}Model")(config).eval()


def answers(model: Any) -> Found:
    """The last states and the gradients of all parameters; the former without gradients, too."""
    model.zero_grad()
    states = model(IDS).last_hidden_state
    states.double().square().sum().backward()
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, states)
    return states.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kernels computed, in Triton's interpreter."""
    seen: list[str] = []

    def counted(name: str) -> Any:
        run = getattr(trained, name)

        def call(*given: Any) -> Any:
            seen.append(name)
            return run(*given)

        return call

    for name in ("rotated_with_gradient", "gated_with_gradient"):
        monkeypatch.setattr(trained, name, counted(name))
    monkeypatch.setenv("BLR_KERNELS", "triton")
    return seen


def counts(taken: list[str]) -> tuple[int, int]:
    """Rotations and gates, and none from here on."""
    found = taken.count("rotated_with_gradient"), taken.count("gated_with_gradient")
    taken.clear()
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(pytest.param(name, (2, 2), marks=pytest.mark.fast) for name in ("Llama", "Qwen3")),
        *((name, (2, 2)) for name in ("Qwen2", "Mistral", "Gemma")),
        ("Phi3", (2, 0)),
        ("Cohere", (0, 2)),
    ],
)
def test_the_same_answers_and_gradients(
    name: str, expected: tuple[int, int], taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models of transformers, and of compressed ones, fused for what needs no gradients already."""
    native = model_of(name)
    wanted = answers(native)
    for compressed in (False, True):
        fused = pickle.loads(pickle.dumps(native))
        if compressed:
            fuse(fused)
        names = list(fused.state_dict())
        fuse_trained(fused)
        assert list(fused.state_dict()) == names
        found = answers(fused)
        assert counts(taken) == (2 * expected[0], 2 * expected[1]), "once with gradients, once without"
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        for mode in ("torch", "auto"):
            monkeypatch.setenv("BLR_KERNELS", mode)
            torch.testing.assert_close(answers(fused), wanted)
        assert counts(taken) == (0, 0), "on a CPU it is the model itself"
        monkeypatch.setenv("BLR_KERNELS", "triton")
    assert native(IDS)[0].requires_grad and counts(taken) == (0, 0), "of this model alone"


@pytest.mark.parametrize(
    ("name", "rotated"), [("GPTNeoX", 0), ("Glm4Moe", 0), ("StableLm", 2), ("Phi", 2)]
)
def test_where_a_part_of_the_features_is_rotated(name: str, rotated: int, taken: list[str]) -> None:
    """The model's function takes that part, or its attention does before it calls the function."""
    native = model_of(name, rope_parameters=PARTIAL, head_dim=4)
    fused = pickle.loads(pickle.dumps(native))
    fuse_trained(fused)
    torch.testing.assert_close(answers(fused), answers(native), rtol=1e-4, atol=1e-4)
    assert counts(taken)[0] == 2 * rotated


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_nearer(dtype: torch.dtype, taken: list[str]) -> None:
    """Numbers are rounded once, the native functions' more often."""
    native = model_of("Llama")
    fused = pickle.loads(pickle.dumps(native)).to(dtype)
    fuse_trained(fused)
    exact, found = answers(native.double()), answers(fused)
    usual = answers(model_of("Llama").to(dtype))
    for a, b, c in zip(exact[1], found[1], usual[1], strict=True):
        ours, theirs = (float((x - a).norm() / a.norm()) for x in (b, c))
        assert ours < max(1.5 * theirs, 1e-2)
    assert counts(taken) == (4, 4)


def test_where_others_look_on_it_is_the_native_function(taken: list[str]) -> None:
    model = model_of("Llama")
    wanted = model(IDS).last_hidden_state
    fuse_trained(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS)
    torch.testing.assert_close(model.double()(IDS).last_hidden_state.float(), wanted)
    model.float()
    angles = model.rotary_emb(wanted, torch.arange(7)[None])
    turned = tuple(angle.detach().requires_grad_() for angle in angles)
    assert counts(taken) == (0, 0)
    layer = model.layers[0].self_attn
    layer(wanted.detach(), turned, attention_mask=None)[0].sum().backward()
    assert all(angle.grad is not None for angle in turned) and counts(taken) == (0, 0)
    layer(wanted.detach(), angles, attention_mask=None)
    assert counts(taken) == (1, 0)


def test_other_modules_are_left_alone() -> None:
    model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    fuse_trained(model)
    fuse_trained(relu := model_of("Llama", hidden_act="relu"))
    modules = [m for m in (*model.modules(), *relu.modules()) if "Norm" not in type(m).__name__]
    own = [m for m in modules if "forward" in vars(m)]
    assert own == [layer.self_attn for layer in relu.layers]
    assert not any(isinstance(module, nn.Linear) for module in own)
