"""Exports for vLLM, MLX and llama.cpp beside ours, as stock libraries compute them: transformers with
compressed-tensors and peft, mlx-lm, llama-cpp-python."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, MORE, save_model, with_tokenizer
from running import Invoke
from tolerances import ENGINE_AS_ROUNDED, ENGINE_EXACT, ENGINE_ROUNDED
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.exporting.engines import Engine, engine_of
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.modeling.layers import QuantizedLinear
from blr.kernels.decode.quantized.formats import K_GROUP, SUPERBLOCK

register()

TEXT = Path(__file__).parents[1] / "data" / "calibration.txt"
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"method": "dense", "quantize": "int8"},
    "int4": {"method": "dense", "quantize": "int4"},
    "int3": {"method": "dense", "quantize": "int3"},
    "int2": {"method": "dense", "quantize": "int2"},
    "q2_k": {"method": "dense", "quantize": "int2", "grid": "q2_k"},
    "q3_k": {"method": "dense", "quantize": "int3", "grid": "q3_k"},
    "int8-16": {"method": "svd", "rank": 16, "base": "int8"},
    "int4-16": {"method": "svd", "rank": 16, "base": "int4"},
    "int3-16": {"method": "svd", "rank": 16, "base": "int3"},
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
GEMMA = {"num_hidden_layers": 6, "tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
# of llama.cpp alone
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gemma2": ("gemma2", {**GEMMA, **CAPS}),
    "gemma3": ("gemma3", GEMMA),
}
SMOLLM2 = os.environ.get("BLR_SMOLLM")  # a folder that scripts/fetch_smollm2.sh made
NAMES = ["tiny", *TYPES, *(["smollm2"] if SMOLLM2 else [])]
TOLD = "{:8} {:8} {:12} KL {:.1e}, largest {:.1e}; greedy {}"


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by type; "tiny" is a trained Llama, as is SmolLM2."""
    folder, found = tmp_path_factory.mktemp("models"), {"tiny": tiny, "smollm2": Path(SMOLLM2 or "")}
    for name, (kind, changed) in {**TYPES, **FURTHER}.items():
        config, settings, cls = {**MODELS, **MORE}[kind]
        save_model(config, {**settings, **SIZES, **changed}, cls, folder / name)
        found[name] = with_tokenizer(folder / name, tiny)
    return found


def compressed(dense: Path, name: str, format: str, folder: Path) -> Path:
    """A checkpoint in a format. Those of SmolLM2 are made once, beside it."""
    folder = dense.with_name(f"{dense.name}-{format}") if name == "smollm2" else folder
    return folder if folder.exists() else compress_to(dense, folder, group=32, **FORMATS[format])


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits[0].double()


def text_of(folder: Path, model: Any) -> Tensor:
    """96 tokens of a text, and the 32 that the model continues them with."""
    ids = load_tokenizer(folder)(TEXT.read_text()[:3000], return_tensors="pt").input_ids[:, :96]
    how = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
    found: Tensor = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
    return found


def rounded_input(layer: QuantizedLinear, given: tuple[Tensor]) -> tuple[Tensor]:
    """The input of a layer in 8 bits, as llama.cpp rounds it: 32 numbers share a scale, or 256."""
    shared = K_GROUP * SUPERBLOCK if layer.described.superblocks else K_GROUP
    parts = given[0].unflatten(-1, (-1, shared))
    step = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (((parts / step).round() * step).flatten(-2),)


def rounded_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of our layers where inputs of those in few bits are rounded to 8 bits."""
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    assert layers
    for layer in layers:
        layer.register_forward_pre_hook(rounded_input)
    return logits_of(model, ids)


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL of every token."""
    logs, others = expected.log_softmax(-1), found.log_softmax(-1)
    return (logs.exp() * (logs - others)).sum(-1)


def tell(line: str) -> None:
    """Add a line to the figures that the script prints."""
    with open(os.environ.get("BLR_FIGURES", os.devnull), "a") as file:
        print(line, file=file)


def compare(expected: Tensor, found: Tensor, limit: float, told: tuple[str, ...]) -> None:
    """Print KL and the first of the 32 greedy tokens that differs, and by how much ours likes it less.
    That is at most what the logits differ by there."""
    logs, others = expected.log_softmax(-1), found.log_softmax(-1)
    each = divergence(expected, found)
    chosen = others[95:-1].argmax(-1)
    behind = expected[95:-1].max(-1).values - expected[95:-1].gather(1, chosen[:, None])[:, 0]
    other = [n for n in range(32) if chosen[n] != expected[95 + n].argmax()]
    greedy = f"differs at {other[0]}, a tie of {behind[other[0]]:.1e}" if other else "the same 32"
    tell(TOLD.format(*told, each.mean(), each.max(), greedy))
    assert float(each.mean()) < limit
    assert (behind <= 2 * (logs - others)[95:-1].abs().max(-1).values).all()


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


def check_llama_cpp(ours: Any, ids: Tensor, source: Path, folder: Path, told: tuple[str, str]) -> None:
    """llama.cpp on the weights that it was given, in float32, and as it computes with them. It then
    loses what rounding inputs to 8 bits costs ours."""
    expected = logits_of(ours, ids)
    rounded = divergence(expected, rounded_logits(ours, ids)).mean()
    limit = ENGINE_EXACT + ENGINE_AS_ROUNDED * float(rounded)
    out = export_to(source, folder / "gguf", kind="gguf", check=False)
    exact = engine("gguf").load(in_float32(out, folder / "float32"), "auto")
    compare(expected, logits_of(exact, ids), ENGINE_EXACT, (*told, "gguf, exact"))
    compare(expected, logits_of(engine("gguf").load(out, "auto"), ids), limit, (*told, "gguf"))
    tell("{:8} {:8} {:12} KL {:.1e}".format(*told, "ours rounded", rounded))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_engines_compute_what_we_do(
    name: str, format: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """transformers with compressed-tensors and peft, and MLX, in float32; llama.cpp. Greedy tokens are
    ours, or near-ties."""
    source = compressed(models[name], name, format, tmp_path / "source")
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    folders = {kind: tmp_path / kind for kind in ("vllm", "mlx")}
    for kind, out in folders.items():
        export_to(source, out, kind=kind, check=False, dtype="float32")
    found = {kind: engine(kind).load(out, torch.float32) for kind, out in folders.items()}
    ids = text_of(source, found["vllm"])
    expected = logits_of(ours, ids)
    for kind, model in found.items():
        compare(expected, logits_of(model, ids), ENGINE_EXACT, (name, format, kind))
    check_llama_cpp(ours, ids, source, tmp_path, (name, format))


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
def test_packed_experts_are_what_ours_are(name: str, format: str, tiny: Path, tmp_path: Path) -> None:
    """As transformers and compressed-tensors unpack them."""
    config, settings, cls = MORE[name]
    widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    save_model(config, {**settings, **SIZES, **widths}, cls, tmp_path / "dense")
    source = compressed(with_tokenizer(tmp_path / "dense", tiny), name, format, tmp_path / "source")
    out = export_to(source, tmp_path / "vllm", kind="vllm", check=False, dtype="float32")
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    found, ids = engine("vllm").load(out, torch.float32), text_of(source, ours)
    compare(logits_of(ours, ids), logits_of(found, ids), ENGINE_EXACT, (name, format, "vllm"))


@pytest.mark.parametrize("format", ["int4", "int2-16"])
@pytest.mark.parametrize("name", FURTHER)
def test_llama_cpp_computes_further_types(
    name: str, format: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Layers that are one there and here, norms that add one, sliding windows, soft caps."""
    source = compressed(models[name], name, format, tmp_path / "source")
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = text_of(source, ours)
    check_llama_cpp(ours, ids, source, tmp_path, (name, format))


@pytest.mark.parametrize("kind", ["vllm", "mlx", "gguf"])
def test_the_command_tells_what_the_engine_loses(
    kind: str, tiny: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """It is loaded by the engine, compared, and known to verify, inspect and push."""
    source = compress_to(tiny, tmp_path / "source", group=32, **FORMATS["int4-16"])
    folder = tmp_path / "out"
    code, out, _ = invoke("export", source, "-o", folder, "--as", kind, "--format", "json")
    check = json.loads(out)["check"]
    assert code == 0 and check["kl"]["mean"] < ENGINE_ROUNDED and check["agreement"] > 0.95
    assert "mean KL" in (folder / "README.md").read_text()
    assert invoke("verify", folder)[0] == 0
    assert invoke("inspect", folder)[0] == 0
    assert invoke("push", folder, "someone/model", "--dry-run")[0] == 0
