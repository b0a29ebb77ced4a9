"""`blr export --as vllm`: what the folder holds, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, save_model
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


def test_layers_that_vllm_fuses_must_be_alike(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    rules = [{"match": "*k_proj", "quantize": "int8"}]
    source = compress_to(dense, tmp_path / "source", **PACKED, rules=rules)
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and "k_proj and q_proj are stored differently" in err
    code, _, err = invoke("export", dense, "-o", tmp_path / "out", "--as", "vllm")
    assert code == 2 and "compress with --quantize int4 first" in err
