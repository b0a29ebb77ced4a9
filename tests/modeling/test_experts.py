"""Experts of a mixture are layers of their own, by every way from a plan to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to, tokens_without_blr
from fresh import blr
from heal_models import save_characters, write_text
from killing import killed_after
from pico import MORE, save_model, save_pico
from safetensors.torch import load_file, save_file

from blr.compressor import register
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.exporting.job import export
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.loading.loader import load_written
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.phases import supports
from blr.kernels.common.available import has_triton

register()

MIXTURES = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "gpt-oss", "deepseek-v3", "glm4-moe")
MIXTURES = (*MIXTURES, "granite-moe")
IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_plan_counts_what_is_stored(name: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "dense")
    plan = make_plan(open_source(source), make_recipe(method="svd", cf=2.0))
    experts = [planned for planned in plan.layers if planned.layer.stack]
    output = compress_to(source, tmp_path / "out", method="svd", cf=2.0)
    stored = load_file(output / "model.safetensors")
    found = sum(t.numel() for n, t in stored.items() if ".experts." in n and not n.endswith("_bias"))
    assert found == sum(planned.spec.parameters for planned in experts)
    dense = {planned.layer.entry.name for planned in experts}
    whole = sum(open_source(source).entries[n].parameters for n in dense)
    assert whole == sum(planned.spec.dense_parameters for planned in experts)


CHOICES = {
    "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "all of them": {"num_experts_per_tok": 4},
    "one a token": {"num_experts_per_tok": 1},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_however_many_experts_a_token_chooses(choice: str, tmp_path: Path) -> None:
    config, settings, model = MORE["mixtral"]
    save_model(config, {**settings, **CHOICES[choice]}, model, tmp_path / "dense")
    native = load_written(tmp_path / "dense")(IDS).logits
    int8 = compress_to(tmp_path / "dense", tmp_path / "int8", method="dense", quantize="int8", group=32)
    assert (load_written(int8)(IDS).logits - native).norm() < 0.05 * native.norm()
    low_rank = load_written(compress_to(tmp_path / "dense", tmp_path / "svd", method="svd", rank=4))
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": False}
    given = {"attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    expected = low_rank.generate(IDS, **given, **asked)[:, IDS.shape[1] :].tolist()
    ours = Decoder(low_rank, context=64, batch=2, ops="torch")
    assert ours.generate(IDS, max_new_tokens=12) == expected


_SMALL = {"vocab_size": 128, "d_model": 32, "num_experts": 4, "expert_capacity": 3}
_SMALL |= {"decoder_start_token_id": 0}
# Types of which an expert takes no more than some tokens of a text
DROPPING: dict[str, dict[str, Any]] = {
    "SwitchTransformers": {
        **{"d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    },
    "NllbMoe": {
        **{"encoder_layers": 2, "encoder_ffn_dim": 64, "encoder_attention_heads": 4},
        **{"decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4},
        **{"encoder_sparse_step": 1, "decoder_sparse_step": 1, "max_position_embeddings": 64},
    },
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_token_beyond_the_capacity_of_an_expert_passes_it_by(name: str, tmp_path: Path) -> None:
    """Experts that are modules of their own are layers; their router is as it was."""
    source, given = tmp_path / "dense", {"input_ids": IDS, "decoder_input_ids": IDS}
    settings = {**_SMALL, **DROPPING[name]}
    save_model(f"{name}Config", settings, f"{name}ForConditionalGeneration", source)
    found = []
    for way in ({"method": "svd", "cf": 1.5}, {"method": "dense", "quantize": "int8", "group": 32}):
        output = compress_to(source, tmp_path / str(len(found)), **way)
        layers = json.loads((output / "config.json").read_text())["blr"]["layers"]
        assert any(".experts.expert_3." in layer for layer in layers)
        assert not any(".router." in layer for layer in layers)
        found.append(load_written(output)(**given).logits)
        export(
            output,
            tmp_path / f"dense-{len(found)}",
            ExportOptions("out", kind="dense"),
            Progress(quiet=True),
        )
        dense = load_written(tmp_path / f"dense-{len(found)}")(**given).logits
        assert (found[-1] - dense).norm() < 1e-4 * dense.norm()
    native = load_written(source)(**given).logits
    assert (found[1] - native).norm() < 0.05 * native.norm()


def test_a_stack_is_compressed_whole_or_not_at_all(tmp_path: Path) -> None:
    source = save_pico("mixtral", tmp_path / "dense")
    with pytest.raises(RuntimeError, match=r"code 2: .*experts.gate_up_proj: 1 of 8 layers stay dense"):
        blr("plan", source, "--exclude", "*.0.*.experts.w1.2")
    with pytest.raises(
        RuntimeError, match=r"code 2: .*experts\.2\.w\d\.weight.* called '.*experts\.w\d\.2'"
    ):
        blr("plan", source, "--exclude", "*.experts.2.*")
    output = tmp_path / "out"
    blr("compress", source, "-o", output, "--force", "--exclude", "*.0.*.experts.w2.*")
    assert load_written(output)(IDS).logits.isfinite().all()


def save_with_an_idle_expert(folder: Path) -> None:
    """A model of which no token chooses expert 4: two of the others are as likely as they are not."""
    config, settings, model = MORE["mixtral"]
    save_model(config, {**settings, "num_local_experts": 5}, model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, gate in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            gate[1], gate[3], gate[4] = -gate[0], -gate[2], 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_characters(folder)


@pytest.mark.parametrize("how", [("svd", "--cf", "1.5"), ("dense", "--quantize", "int4", "--group", 32)])
def test_experts_are_fitted_to_their_own_tokens(how: tuple[object, ...], tmp_path: Path) -> None:
    """The report says how many each had; one without any is fitted to those of the others."""
    source, output = tmp_path / "dense", tmp_path / "out"
    save_with_an_idle_expert(source)
    text = write_text(tmp_path / "text.txt", 6000)
    sizes = ("--seq-len", 32, "--samples", 16, "--refit", 1, "--force")
    said = blr("compress", source, "-o", output, "--text", text, "--method", *how, *sizes).err
    assert "of 30 layers of experts had fewer than 4 tokens for each of their inputs, 6 had none" in said
    report = json.loads((output / "report.json").read_text())
    found = {layer["module"]: layer.get("tokens") for layer in report["layers"]}
    for block in (0, 1):
        for part in ("w1", "w2", "w3"):
            names = [f"model.layers.{block}.block_sparse_moe.experts.{part}.{n}" for n in range(5)]
            counts = [found[name] for name in names]
            assert sum(counts) == 2 * 16 * 32 and counts[4] == 0 < min(counts[:4])
    assert found["model.layers.0.self_attn.q_proj"] is None
    errors = {layer["module"]: layer["error"] for layer in report["layers"]}
    assert errors["model.layers.0.block_sparse_moe.experts.w1.4"] < 0.9


@pytest.mark.parametrize("name", MIXTURES)
def test_exports_for_other_tools_compute_the_same(name: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", method="svd", cf=1.5)
    expected = load_written(output)(IDS).logits
    for form in ("dense", "plain"):
        export(output, tmp_path / f"as-{form}", ExportOptions("out", kind=form), Progress(quiet=True))
        found = load_written(tmp_path / f"as-{form}")
        assert (found(IDS).logits - expected).norm() < 1e-4 * expected.norm()
    assert found.generate(IDS[:1], max_new_tokens=4, do_sample=False).shape == (1, 16)


WAYS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "cf": 1.5},
    "int4": {"method": "dense", "quantize": "int4", "group": 32},
    "corrected": {"method": "svd", "base": "int2", "rank": 2, "group": 32},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss"])
def test_an_export_decodes_its_experts(name: str, way: str, tmp_path: Path) -> None:
    """By the runtime, one row and several: the tokens that transformers gives without a cache. With one
    it multiplies a token with packed weights by an operator that rounds otherwise."""
    source = save_pico(name, tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", **WAYS[way])
    export(output, tmp_path / "export", ExportOptions("out", batch=2), Progress(quiet=True))
    model = load_written(tmp_path / "export")
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": False}
    whole = {"attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    expected = load_written(output).generate(IDS, **whole, **asked)
    assert supports(model) is None
    ours = Decoder(model, context=64, batch=2, ops="torch")
    for rows in (1, 2):
        found = ours.generate(IDS[:rows], max_new_tokens=12)
        assert found == expected[:rows, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["olmoe", "deepseek-v3", "glm4-moe", "granite-moe"])
def test_an_export_that_is_not_decoded_gives_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and generates as its folder does, by the package and without it. Kernels are off: on
    a CPU they round a token of few bits to bfloat16, which changes the experts at a near tie."""
    monkeypatch.setenv("BLR_KERNELS", "torch")
    source, folders = save_pico(name, tmp_path / "dense"), dict[str, Path]()
    for way, options in WAYS.items():
        folders[way] = compress_to(source, tmp_path / way, **options)
        folders[f"{way} exported"] = export_to(folders[way], tmp_path / f"{way}-export")
    bare = tokens_without_blr(folders, IDS[0].tolist(), tmp_path / "bare")
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    for way, folder in folders.items():
        model = load_written(folder)
        assert "expected one of llama" in str(supports(model))
        assert model.generate(IDS[:1], **asked)[0].tolist() == bare[way] == bare[way.split()[0]]


@pytest.mark.parametrize("way", ["dense", *WAYS])
def test_sinks_biases_and_clamped_gates_are_decoded(way: str, tmp_path: Path) -> None:
    """64 tokens, beyond the sliding window, of a model that they make a difference to."""
    config, settings, name = MORE["gpt-oss"]
    source, changed = tmp_path / "dense", {"max_position_embeddings": 128, "swiglu_limit": 0.5}
    save_model(config, {**settings, **changed}, name, source)
    tensors = load_file(source / "model.safetensors")
    tensors = {n: t * (16 if n.endswith(("bias", "sinks")) else 2) for n, t in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    output = source if way == "dense" else compress_to(source, tmp_path / "out", **WAYS[way])
    model, whole = load_written(output), {"attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    asked = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "use_cache": False}
    expected = model.generate(IDS, **whole, **asked)[:, IDS.shape[1] :].tolist()
    assert len(set(expected[0])) > 5
    assert Decoder(model, context=128, batch=2, ops="torch").generate(IDS, max_new_tokens=64) == expected
    if has_triton():
        by_kernels = Decoder(model, context=128, ops="triton").generate(IDS[:1], max_new_tokens=8)
        assert by_kernels == [expected[0][:8]]


def test_a_run_that_is_killed_amid_experts_ends_with_the_same_bytes(tmp_path: Path) -> None:
    source = save_pico("mixtral", tmp_path / "dense")
    save_characters(source)
    text = write_text(tmp_path / "text.txt", 6000)
    sizes = ("--cf", "1.5", "--seq-len", 32, "--samples", 8, "--refit", 1, "--force")
    asked = ("compress", source, "--text", text, "--method", "svd", *sizes)
    blr(*asked, "-o", tmp_path / "whole")
    for stores in (8, 17, 33):  # among experts of the first block, of the second, and behind these
        output = tmp_path / f"killed-{stores}"
        with killed_after(stores):
            blr(*asked, "-o", output)
        assert "resumed with" in blr(*asked, "-o", output).err
        name = "model.safetensors"
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("kind", ["gguf", "mlx"])
def test_packed_experts_are_refused_for_engines_of_others(kind: str, tmp_path: Path) -> None:
    source = save_pico("qwen3-moe", tmp_path / "dense")
    output = compress_to(source, tmp_path / "out", **WAYS["int4"])
    with pytest.raises(RuntimeError, match=r"code 2: .* 24 layers have no form in .*\.experts"):
        blr("export", output, "-o", tmp_path / "export", "--as", kind)
