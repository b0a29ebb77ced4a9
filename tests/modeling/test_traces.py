"""What is traced to run elsewhere holds torch's own operations, of every structure and at any size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from kernel_layers import SPECS, pair
from pico import VOCAB, inputs_for, save_pico
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from blr.compressor import register

register()

pytestmark = pytest.mark.fast
METHODS = {"svd": {}, "monarch": {"blocks": 4}, "blast": {"blocks": 4, "rounds": 1}, "ks": {}}


class FirstResult(nn.Module):
    """A model as a function of ids alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits or hidden states [B, T, …]."""
        return self.model(ids)[0]


def exported(module: nn.Module, x: Tensor) -> tuple[Any, str]:
    free = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("tokens", min=1)}
    program = torch.export.export(module, (x,), dynamic_shapes=(free,))
    return program.module(), str(program.graph)


def traced(module: nn.Module, x: Tensor) -> tuple[Any, str]:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still what many tools use
        found = torch.jit.trace(module, x, check_trace=False, strict=False)
    return found, str(found.inlined_graph)


@pytest.mark.parametrize(
    ("trace", "gradients"),
    [(exported, torch.no_grad), (traced, torch.no_grad), (traced, torch.enable_grad)],
)
@pytest.mark.parametrize("layout", [0, 1], ids=["canonical", "kernel layout"])
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_is_plain_products(
    name: str, layout: int, trace: Callable[..., Any], gradients: Callable[[], Any]
) -> None:
    layer = pair(name)[layout]
    with gradients():
        found, text = trace(layer, torch.randn(2, 5, 20))
    x = torch.randn(3, 7, 20)
    torch.testing.assert_close(found(x), layer(x))
    assert "blr::" not in text and "ops.blr" not in text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "auto"), [("bert", AutoModel), ("llama", AutoModelForCausalLM)])
def test_a_model_traces_at_any_size(name: str, auto: Any, method: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", method=method, cf=1.5, **METHODS[method])
    model = FirstResult(auto.from_pretrained(output, use_cache=False).eval())
    found, text = traced(model, inputs_for(model.model)["input_ids"])
    ids = torch.randint(2, VOCAB, (3, 17))
    torch.testing.assert_close(found(ids), model(ids))
    assert "blr::" not in text
