"""`blr export --as vllm`: what the folder holds, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, MORE, save_model
from running import Invoke
from safetensors.torch import load_file

from blr.compressor.commands.inspect import inspect_output
from blr.compressor.exporting.vllm import pack

RANKS = [{"match": "*down_proj", "rank": 4}]
CORRECTED = {"method": "svd", "base": "int2", "rank": 2, "group": 32, "rules": RANKS}
PACKED = {"method": "dense", "quantize": "int4", "group": 32}
MIXED = {**PACKED, "rules": [{"match": "*down_proj", "quantize": "int8"}]}
# settings, and what the refusal names
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "low rank": ({"method": "svd", "cf": 1.5}, "svd r="),
    "curved": ({"method": "dense", "quantize": "int3", "grid": "curved", "group": 32}, "--grid uniform"),
    "group": ({"method": "dense", "quantize": "int4"}, "take a smaller --group"),
    "blast": ({**CORRECTED, "method": "blast", "blocks": 2, "rules": []}, "a correction by blast"),
    "fp8": ({"method": "dense", "quantize": "fp8"}, "in the place of a weight"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, settings, cls = MODELS["llama"]
    settings = {**settings, "intermediate_size": 64}
    folder = tmp_path_factory.mktemp("dense")
    save_model(config, settings, cls, folder)
    return folder


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_word_holds_the_lowest_fields_first(bits: int) -> None:
    """Number by number as compressed-tensors says: field n begins at bit n times the bits."""
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1)
    levels = torch.randint(least, most, (3, 40), generator=torch.Generator().manual_seed(0)).to(
        torch.int8
    )
    rows = [sum((int(x) - least) << n * bits for n, x in enumerate(row)) for row in levels]
    words = -(-40 * bits // 32)
    expected = [[row >> 32 * n & 0xFFFFFFFF for n in range(words)] for row in rows]
    assert (pack(levels, bits).long() & 0xFFFFFFFF).tolist() == expected


def test_ranks_differ_by_layer_and_nothing_is_scaled(dense: Path, tmp_path: Path) -> None:
    source = compress_to(dense, tmp_path / "source", **CORRECTED)
    folder = export_to(source, tmp_path / "out", kind="vllm", check=False)
    adapter = json.loads((folder / "adapter/adapter_config.json").read_bytes())
    factors = load_file(folder / "adapter/adapter_model.safetensors")
    assert adapter["r"] == adapter["lora_alpha"] == 4
    assert adapter["rank_pattern"] == adapter["alpha_pattern"] and len(adapter["rank_pattern"]) == 12
    for name, factor in factors.items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        assert factor.shape[part != "A.weight"] == adapter["rank_pattern"].get(module, 4)
    assert {tensor.dtype for tensor in factors.values()} == {torch.float32}


def test_each_scheme_is_a_group_of_layers(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    """Bits differ by layer; verify, inspect and push know the folder."""
    source, folder = compress_to(dense, tmp_path / "source", **MIXED), tmp_path / "out"
    code, out, _ = invoke("export", source, "-o", folder, "--as", "vllm", "--no-check")
    assert code == 0 and f"run:    vllm serve {folder}" in out
    config = json.loads((folder / "config.json").read_bytes())
    groups = config["quantization_config"]["config_groups"].values()
    kinds = {group["weights"]["num_bits"]: len(group["targets"]) for group in groups}
    assert kinds == {4: 12, 8: 2} and config["quantization_config"]["ignore"] == [r"re:(.*\.)?lm_head$"]
    assert config["model_type"] == "llama" and not list(folder.glob("*.py"))
    assert invoke("verify", folder)[0] == 0
    assert len(inspect_output(folder)["layers"]) == 14
    assert invoke("push", folder, "someone/model", "--dry-run")[0] == 0
    code, _, err = invoke("export", folder, "-o", tmp_path / "again")
    assert code == 4 and "quant" in err


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_or_dense(
    name: str, dense: Path, tmp_path: Path, invoke: Invoke
) -> None:
    settings, reason = REFUSED[name]
    only = {"include": ["*down_proj"]}
    source = compress_to(dense, tmp_path / "source", **settings, **only)
    asked = ("export", source, "-o", tmp_path / "out", "--as", "vllm", "--no-check")
    code, _, err = invoke(*asked)
    assert (
        code == 2
        and reason in err
        and "--dense-rest" in err
        and "by the plugin" in err
        and err.count("\n") == 1
    )
    code, _, err = invoke(*asked, "--dense-rest")
    assert code == 2 and "no layer in few bits" in err


def test_rest_is_dense_where_that_is_asked(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    rules = [{"match": "*down_proj", "method": "svd", "cf": 1.5, "quantize": "none"}]
    source = compress_to(dense, tmp_path / "source", **PACKED, rules=rules)
    asked = ("export", source, "-o", tmp_path / "out", "--as", "vllm", "--no-check", "--dense-rest")
    code, out, _ = invoke(*asked)
    assert code == 0 and "12 in few bits" in out and "2 of other form, made dense" in out
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (32, 64)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    config, settings, cls = MORE["mixtral"]
    save_model(config, {**settings, "intermediate_size": 64}, cls, folder)
    return folder


def test_experts_are_written_one_by_one(mixture: Path, tmp_path: Path, invoke: Invoke) -> None:
    """By the names that they have in the checkpoint; experts that are dense stay as they are."""
    for name, exclude in (("packed", []), ("dense", ["*.1.*.experts.*"])):
        source = compress_to(mixture, tmp_path / f"{name}-source", **PACKED, exclude=exclude)
        folder = tmp_path / name
        assert invoke("export", source, "-o", folder, "--as", "vllm", "--no-check")[0] == 0
        stored = load_file(folder / "model.safetensors")
        first, last = (f"model.layers.{n}.block_sparse_moe.experts.3.w2" for n in (0, 1))
        assert stored[f"{first}.weight_packed"].shape == (32, 64 * 4 // 32)
        assert (f"{last}.weight" in stored) == bool(exclude) != (f"{last}.weight_packed" in stored)
        config = json.loads((folder / "config.json").read_bytes())["quantization_config"]
        (group,) = config["config_groups"].values()
        parts = [f"{m.rpartition('.')[0]}.{part}" for m in (first, last) for part in ("w1", "w2", "w3")]
        for module, packed in zip(parts, (True,) * 3 + (not exclude,) * 3, strict=True):
            assert any(re.match(t.removeprefix("re:"), module) for t in group["targets"]) == packed
        assert invoke("verify", folder)[0] == 0


MIXED_EXPERTS = [{"match": "*.experts.w2.*", "quantize": "int8"}]
MIXED_OTHERS = [{"match": "*.0.self_attn.*", "quantize": "int8"}]
# settings of a mixture, and what the refusal names
UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({**PACKED, "rules": MIXED_EXPERTS}, "all layers of an expert alike"),
    "dense": ({**PACKED, "exclude": ["*.experts.w2.*"]}, "all layers of an expert alike"),
    "others": ({**PACKED, "rules": MIXED_OTHERS}, "all other layers alike"),
    "int2": ({**PACKED, "quantize": "int2"}, "takes experts in int8 and int4"),
    "corrected": ({**CORRECTED, "base": "int4", "rules": []}, "takes experts in int8 and int4"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_vllm_does_not_take_of_experts(
    name: str, mixture: Path, tmp_path: Path, invoke: Invoke
) -> None:
    settings, reason = UNLIKE[name]
    source = compress_to(mixture, tmp_path / "source", **settings)
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and reason in err and err.count("\n") == 1


def test_stacks_of_experts_are_refused(tmp_path: Path, invoke: Invoke) -> None:
    config, settings, cls = MORE["gpt-oss"]
    save_model(config, {**settings, "intermediate_size": 64}, cls, tmp_path / "dense")
    source = compress_to(tmp_path / "dense", tmp_path / "source", **PACKED)
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and "no nn.Linear of its own" in err


def test_layers_that_vllm_fuses_must_be_alike(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    rules = [{"match": "*k_proj", "quantize": "int8"}]
    source = compress_to(dense, tmp_path / "source", **PACKED, rules=rules)
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and "k_proj and q_proj are stored differently" in err
    code, _, err = invoke("export", dense, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and "compress with --quantize int4 first" in err
