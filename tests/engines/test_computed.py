"""`blr export --as mlx` and `--as gguf` as mlx-lm and llama-cpp-python compute them, beside ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, save_model, with_tokenizer
from running import Invoke
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.exporting.engines import Engine, engine_of

register()

UNIFORM = {"grid": "uniform"}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"method": "dense", "quantize": "int8"},
    "int4": {"method": "dense", "quantize": "int4"},
    "int3": {"method": "dense", "quantize": "int3", **UNIFORM},
    "int2": {"method": "dense", "quantize": "int2"},
    "int8-16": {"method": "svd", "rank": 16, "base": "int8"},
    "int4-16": {"method": "svd", "rank": 16, "base": "int4"},
    "int3-16": {"method": "svd", "rank": 16, "base": "int3", **UNIFORM},
    "int2-16": {"method": "svd", "rank": 16, "base": "int2"},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
SIZES = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
}
EXACT, ROUNDED = 1e-5, 2e-3  # KL; llama.cpp rounds what it multiplies with Q4_0 and Q8_0 to 8 bits
TIE = 0.1  # logits of tokens between which that rounding may choose


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by type; "tiny" is a trained Llama."""
    folder, found = tmp_path_factory.mktemp("models"), {"tiny": tiny}
    for name, (kind, changed) in TYPES.items():
        config, settings, cls = MODELS[kind]
        save_model(config, {**settings, **SIZES, **changed}, cls, folder / name)
        found[name] = with_tokenizer(folder / name, tiny)
    return found


def logs_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits[0].double().log_softmax(-1)


def divergence(expected: Tensor, found: Tensor) -> float:
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def check_greedy(ours: Any, theirs: Any, ids: Tensor, tie: float) -> None:
    """32 tokens of theirs are what ours would take at each place, but for near-ties."""
    for _ in range(32):
        chosen = logs_of(theirs, ids)[-1].argmax()
        scores = logs_of(ours, ids)[-1]
        assert float(scores.max() - scores[chosen]) <= tie
        ids = torch.cat([ids, chosen.view(1, 1)], 1)


def in_float32(folder: Path, copy: Path) -> Path:
    """A copy whose weights are those that the package gguf reads, in float32."""
    shutil.copytree(folder, copy)
    reader = gguf.GGUFReader(folder / "model.gguf")
    writer = gguf.GGUFWriter(copy / "model.gguf", reader.fields["general.architecture"].contents())
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kinds = [*entry.types, None]
            writer.add_key_value(key, entry.contents(), kinds[0], kinds[1])
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        writer.add_tensor(tensor.name, weight.reshape([int(n) for n in tensor.shape][::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def engine(kind: str) -> Engine:
    found = engine_of(kind)
    assert found is not None and not found.missing
    return found


@pytest.mark.parametrize("name", ["tiny", *TYPES])
@pytest.mark.parametrize("format", FORMATS)
def test_engines_compute_what_we_do(
    name: str, format: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """MLX to its rounding in float32; llama.cpp so on the weights that it was given, in float32, and to
    its own rounding as it computes with them. Greedy tokens are ours, or near-ties."""
    source = compress_to(models[name], tmp_path / "source", group=32, **FORMATS[format])
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.randint(1, 4096, (1, 96), generator=torch.Generator().manual_seed(0))
    expected = logs_of(ours, ids)
    out = export_to(source, tmp_path / "mlx", kind="mlx", check=False, dtype="float32")
    model = engine("mlx").load(out, torch.float32)
    assert divergence(expected, logs_of(model, ids)) < EXACT
    check_greedy(ours, model, ids[:, :16], 1e-3)
    out = export_to(source, tmp_path / "gguf", kind="gguf", check=False)
    exact = engine("gguf").load(in_float32(out, tmp_path / "copy"), "auto")
    assert divergence(expected, logs_of(exact, ids)) < EXACT
    model = engine("gguf").load(out, "auto")
    assert divergence(expected, logs_of(model, ids)) < ROUNDED
    check_greedy(ours, model, ids[:, :16], TIE)


@pytest.mark.parametrize("kind", ["mlx", "gguf"])
def test_the_command_tells_what_the_engine_loses(
    kind: str, tiny: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """It is loaded by the engine, compared, and known to verify, inspect and push."""
    source = compress_to(tiny, tmp_path / "source", group=32, **FORMATS["int4-16"])
    folder = tmp_path / "out"
    code, out, _ = invoke("export", source, "-o", folder, "--as", kind, "--format", "json")
    found = json.loads(out)
    assert code == 0 and found["check"]["kl"]["mean"] < ROUNDED and found["check"]["agreement"] > 0.95
    assert "mean KL" in (folder / "README.md").read_text()
    assert invoke("verify", folder)[0] == 0
    assert invoke("inspect", folder)[0] == 0
    assert invoke("push", folder, "someone/model", "--dry-run")[0] == 0
