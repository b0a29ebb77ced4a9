"""Norms, activations and gates that round to float8: in models of transformers, eager and compiled."""

from __future__ import annotations

import copy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GemmaConfig,
    GemmaModel,
    LlamaConfig,
    LlamaModel,
    ViTConfig,
    ViTModel,
)

from blr.bench.models import to_float8
from blr.compressor.modeling import float8
from blr.compressor.modeling.float8 import Float8Gate, Float8Maker
from blr.compressor.modeling.probes import gate_of
from blr.kernels.fp8 import op

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "attn_implementation": "eager"}
TEXT = {**SIZES, "vocab_size": 96}
IMAGES = {**SIZES, "image_size": 8, "patch_size": 4}
IDS = torch.arange(14).view(2, 7)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.bfloat16).view(2, 3, 8, 8)
# What is called a model; how many rows one forward makes by itself, and inside what makes their input
CASES: dict[str, tuple[Any, Any, Tensor, int, int]] = {
    "llama": (LlamaModel, LlamaConfig(**TEXT, num_key_value_heads=2), IDS, 2, 6),
    "gemma": (GemmaModel, GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8), IDS, 6, 2),
    "bert": (BertModel, BertConfig(**TEXT), IDS, 3, 7),
    "vit": (ViTModel, ViTConfig(**IMAGES), PIXELS, 3, 6),
}


def run(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x).last_hidden_state
    return y


def distance(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rows were made, on a device that is said to multiply in float8."""
    kinds: list[str] = []
    plain = op._run_rows

    def counted(x: Tensor, make: str, *rest: Any) -> tuple[Tensor, ...]:
        kinds.append(make)
        return plain(x, make, *rest)

    monkeypatch.setattr(float8, "fp8_device", lambda device: True)
    monkeypatch.setattr(op, "_run_rows", counted)
    return kinds


def model_of(name: str) -> Any:
    cls, config, *_ = CASES[name]
    torch.manual_seed(0)
    model = cls(config).to(torch.bfloat16).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias.normal_()
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_rows_are_made_where_their_input_is(name: str, made: list[str]) -> None:
    x, alone, inside = CASES[name][2:]
    plain = model_of(name)
    expected, model = run(plain, x), to_float8(copy.deepcopy(plain))
    y = run(model, x)
    assert sum(not kind for kind in made) == alone and sum(map(bool, made)) == inside
    assert distance(y, expected) < 0.1
    torch.save(model, file := BytesIO())
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        made.clear()
        assert torch.equal(run(again, x), y) and sum(map(bool, made)) == inside


@torch.no_grad()
def test_rows_of_an_output_that_was_written_to_are_made_again(made: list[str]) -> None:
    model = to_float8(model_of("llama"))
    layer = model.layers[0]
    x = torch.randn(1, 5, 32, dtype=torch.bfloat16)
    y = layer.input_layernorm(x)
    first = layer.self_attn.q_proj(y)
    y.mul_(2)
    assert distance(layer.self_attn.q_proj(y), 2 * first) < 0.02 and made == ["rms", ""]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled_blocks_hold_only_what_is_read(name: str, made: list[str]) -> None:
    x, _, inside = CASES[name][2:]
    model = to_float8(model_of(name))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = run(model, x)
        layers = model.layers if name == "llama" else model.encoder.layer
        for layer in layers:
            layer.compile(backend=keep, fullgraph=True)
        assert distance(run(model, x), expected) < 0.02
    graph = graphs[0].graph
    graph.eliminate_dead_code()
    rows = [node.args[1] for node in graph.nodes if node.target is op._ROWS.op]
    assert sum(map(bool, rows)) == inside // 2
    native = [node for node in graph.nodes if node.target in (torch.rsqrt, nn.functional.silu)]
    assert not native  # of what is read in float8 alone


def test_gradients_go_through_what_is_native(made: list[str]) -> None:
    model = to_float8(model_of("llama"))
    x = model.embed_tokens(IDS).detach().requires_grad_()
    model(inputs_embeds=x).last_hidden_state.sum().backward()
    assert made == [] and x.grad is not None and bool(torch.isfinite(x.grad).all())


def test_only_what_computes_so_is_taken_over() -> None:
    class Other(nn.Module):
        """A gated MLP with more in it."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
            return y

    kinds = (Float8Maker, Float8Gate)
    models = [to_float8(model_of(name)) for name in CASES]
    found = [[m for m in model.modules() if isinstance(m, kinds)] for model in models]
    assert [len(taken) for taken in found] == [6, 2, 7, 6]
    assert gate_of(Other()) is None
    assert {m.float8_make for m in found[1]} == {"geglu"}  # whose norm adds 1 to its gain
