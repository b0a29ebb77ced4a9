"""What SGLang's Transformers backend asks of a checkpoint, as its source says in 0.5.23
(`python/sglang/srt/models/transformers.py`): parameters on no device until the model is whole,
attention by a function of its own that finds its arguments among those of the call, weights by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from pico import save_pico
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sglang"
METHODS: dict[str, dict[str, Any]] = {
    "svd": {},
    "monarch": {"blocks": 4},
    "blast": {"blocks": 4, "rounds": 1},
    "ks": {},
}


@contextmanager
def parameters_nowhere() -> Iterator[None]:
    """Parameters are made on the meta device, buffers where they always are."""
    register = nn.Module.register_parameter

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            held = module._parameters[name]
            module._parameters[name] = nn.Parameter(held.to("meta"), held.requires_grad)

    nn.Module.register_parameter = moved
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Rows of tokens from its own place, as SGLang's keeps them with the batch."""
    assert given["forward_batch"] == "batch"
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    given["attention_instances"][module.layer_idx] += 1
    return found.transpose(1, 2).reshape(query.shape[2], -1), None


def resolved(config: Any, folder: Path) -> Any:
    """The class whose support of attention functions is asked for."""
    named = config.auto_map
    return get_class_from_dynamic_module(named.get("AutoModel") or named["AutoModelForCausalLM"], folder)


def built(config: Any, tensors: dict[str, Tensor]) -> Any:
    """The model with its weights put into empty parameters by name."""
    with parameters_nowhere():
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True)
    assert not any(isinstance(m, nn.Linear) for m in model.modules()), "it would be replaced"
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        assert parameter.is_meta
        setattr(model.get_submodule(owner), last, nn.Parameter(tensors.pop(f"model.{name}")))
    assert tensors.keys() <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_hidden_states_are_those_of_transformers(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_pico(family, tmp_path / "dense")
    folder = compress_to(source, tmp_path / "out", method=method, cf=1.5, **METHODS[method])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, attention)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert resolved(config, folder)._supports_attention_backend
    config._attn_implementation = NAME
    model = built(config, load_file(folder / "model.safetensors"))
    ids, seen = torch.arange(2, 14)[None], dict.fromkeys(range(config.num_hidden_layers), 0)
    given = {"forward_batch": "batch", "attention_instances": seen}
    with torch.inference_mode():
        positions = torch.arange(12)[None]
        found = model(
            input_ids=ids, position_ids=positions, use_cache=False, return_dict=False, **given
        )[0]
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = whole.model(ids).last_hidden_state
    assert set(seen.values()) == {1}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plans = [getattr(model, "tp_plan", None), getattr(config, "base_model_tp_plan", None)]
    assert not any(plans), "with several processes it says that it cannot be split, and stops"
