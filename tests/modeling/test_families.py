"""What is done with loaded structured models: generation, training, saving, other classes of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
import transformers
from pico import MODELS, MORE, inputs_for, save_pico
from safetensors.torch import load_file
from tolerances import TOLERANCES

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.recipe.schema import make_recipe

register()

pytestmark = pytest.mark.fast

AUTO = {"CausalLM": "AutoModelForCausalLM", "MaskedLM": "AutoModelForMaskedLM"}
AUTO |= {"ImageClassification": "AutoModelForImageClassification"}


def auto_class(name: str) -> Any:
    """The Auto class for the pico model `name`."""
    architecture = {**MODELS, **MORE}[name][2].replace("LMHeadModel", "ForCausalLM")
    return getattr(transformers, AUTO.get(architecture.partition("For")[2], "AutoModel"))


def compress_pico(name: str, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Save the pico model, compress it; returns both folders."""
    source, output = save_pico(name, folder / "dense"), folder / "out"
    recipe = make_recipe(**{"method": "svd", "cf": 1.5, **settings})
    compress(source, recipe, output, Settings("pico", check=False), Progress(quiet=True))
    return source, output


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gpt2"])
def test_generation_with_cache_equals_generation_without(name: str, tmp_path: Path) -> None:
    _, output = compress_pico(name, tmp_path)
    model = auto_class(name).from_pretrained(output, dtype=torch.float32).eval()
    prompt = inputs_for(model)["input_ids"][:1]
    arguments = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(prompt, use_cache=True, **arguments)
    assert cached.shape[1] == prompt.shape[1] + 16
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **arguments))


@pytest.mark.parametrize("name", ["llama", "bert-mlm", "vit"])
def test_base_model_loads_from_a_head_checkpoint(name: str, tmp_path: Path) -> None:
    _, output = compress_pico(name, tmp_path)
    model, info = transformers.AutoModel.from_pretrained(output, output_loading_info=True)
    assert not [key for key in info["missing_keys"] if "pooler" not in key]
    structured = [m for m in model.modules() if isinstance(m, StructuredLinear)]
    assert len(structured) >= 12


def test_a_base_model_leaves_a_structured_head_out_and_saves_itself(tmp_path: Path) -> None:
    _, output = compress_pico("llama", tmp_path, include=["lm_head", "*.mlp.*"])
    model = transformers.AutoModel.from_pretrained(output)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again")
    inputs = inputs_for(model)
    with torch.no_grad():
        found, expected = (m.eval()(**inputs).last_hidden_state for m in (again, model))
    assert torch.equal(found, expected)


def test_saving_a_loaded_model_keeps_its_names_on_disk(tmp_path: Path) -> None:
    _, output = compress_pico("vit", tmp_path)
    auto_class("vit").from_pretrained(output).save_pretrained(tmp_path / "again")
    names = [set(load_file(folder / "model.safetensors")) for folder in (output, tmp_path / "again")]
    assert names[0] == names[1]


def test_structured_layers_train(tmp_path: Path) -> None:
    _, output = compress_pico("llama", tmp_path, method="blast", blocks=4, rounds=0)
    model = auto_class("llama").from_pretrained(output)
    ids = inputs_for(model)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    layer = next(m for m in model.modules() if isinstance(m, StructuredLinear))
    assert all(p.grad is not None and p.grad.norm() > 0 for p in layer.parameters())


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"quantize": "fp8"}], ids=str)
def test_what_is_kept_in_float32_keeps_integers_and_float8(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """T5 beside float16 keeps `wo` so, where packed numbers lie."""
    _, output = compress_pico("t5", tmp_path, **settings)
    exact, half = (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(output, dtype=dtype).eval()
        for dtype in (torch.float32, torch.float16)
    )
    ids = inputs_for(exact)["input_ids"]
    with torch.no_grad():
        expected, found = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (exact, half))
    assert (found - expected).norm() < 10 * TOLERANCES[torch.float16] * expected.norm()  # of a model


def test_new_model_from_configuration_has_finite_weights(tmp_path: Path) -> None:
    _, output = compress_pico("llama", tmp_path)
    config = transformers.AutoConfig.from_pretrained(output)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_every_family_is_registered_when_it_is_asked_for(tmp_path: Path) -> None:
    """`blr.compressor.register()` alone, in a process that asked for no other."""
    folders = [str(compress_pico(name, tmp_path / name)[1]) for name in ("electra", "t5", "opt")]
    code = """
import json, sys
from blr.compressor import register
register()
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert "blr_nothing" not in CONFIG_MAPPING and "blr_t5" in CONFIG_MAPPING
print(json.dumps([type(AutoModel.from_pretrained(folder)).__name__ for folder in sys.argv[1:]]))
"""
    done = bare.run(code, *folders)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["BlrElectraModel", "BlrT5Model", "BlrOPTModel"]
