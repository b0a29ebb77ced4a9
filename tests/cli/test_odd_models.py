"""Odd settings of models: followed, refused in one line, or left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import Limited, refused
from odd import ODDITIES, save_odd
from pico import save_pico
from safetensors.torch import load_file, save_file
from spoiling import give_words, spoil
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
)

import blr.compressor.modeling  # noqa: F401
from blr.compressor import register
from blr.compressor.checkpoint.extras import inert

register()

TEXT = "the protocol is " * 200

# --- Defaults of models for generation ------------------------------------------------------------

FOLLOWED: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"num_return_sequences": 1, "return_dict_in_generate": True},
    {"return_dict_in_generate": True, "output_scores": True},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": [1, 2]},
    {"bad_words_ids": [[1]]},
    {"prompt_lookup_num_tokens": 2},
    {"do_sample": True, "temperature": 0.7, "top_k": 5},
    {"do_sample": True, "temperature": 0.0},
    {"eos_token_id": [0, 1, 2]},
    {"max_length": 5},
    {"min_new_tokens": 4},
    {"use_cache": False},
    {"pad_token_id": 10**6},
]
ODD: list[dict[str, Any]] = [
    {"stop_strings": ["protocol"]},  # transformers misreads tokenizers of whole words
    {"num_beams": "many"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"constraints": ["x"], "num_beams": 2},
    {"force_words_ids": [[1]], "num_beams": 2},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"assistant_early_exit": 1},
    {"dola_layers": "low"},
    {"cache_implementation": "quantized"},
    {"watermarking_config": {"ngram_len": 0}},
    {"num_return_sequences": 4},
    {"guidance_scale": 2.0},
    {"sequence_bias": [[[1], 2.0]]},
    {"forced_eos_token_id": 10**6},
    {"decoder_start_token_id": -5},
    {"max_time": 1e-9},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("values", [*FOLLOWED, *ODD], ids=str)
def test_generation_defaults(values: dict[str, Any], limited: Limited, model: Path) -> None:
    """What streaming cannot do is done without; what cannot be done at all is refused."""
    spoil(model, "generation_config.json", **values)
    results = [
        limited.run("generate", model, "the", "--max-new-tokens", "4", *more, cwd=model.parent)
        for more in ((), ("--format", "json"))
    ]
    assert {ended.code for ended in results} <= ({0} if values in FOLLOWED else {0, 4})
    if results[0].code == 0:
        assert results[0].out.endswith(json.loads(results[1].out)["text"] + "\n")
        assert results[0].out.startswith("the")
    else:
        refused(results[0], 4, "generation_config.json")


def test_stop_strings_end_a_text(limited: Limited, tiny: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    spoil(model, "generation_config.json", stop_strings=["e"])
    command = ("generate", model, "The protocol is", "--format", "json")
    ended = limited.run(*command, cwd=tmp_path)
    assert ended.code == 0, ended.err
    text = json.loads(ended.out)["text"]
    assert text.count("e") == 1 and text.index("e") > len(text) - 8  # in the last token


@pytest.mark.parametrize("command", ["generate", "eval", "compress", "calibrated", "export"])
def test_results_as_tuples(command: str, limited: Limited, model: Path) -> None:
    """`return_dict` false is a preference of whoever calls the model, not a fault of it."""
    spoil(model, "config.json", return_dict=False)
    (model.parent / "t.txt").write_text(TEXT)
    commands = {
        "generate": ("generate", "model", "the", "--max-new-tokens", "2"),
        "eval": ("eval", "model", "--text", "t.txt", "--window", "16"),
        "compress": ("compress", "model", "-o", "out"),
        "calibrated": (
            *("compress", "model", "-o", "out", "--calibration", "t.txt"),
            *("--samples", "2", "--seq-len", "16"),
        ),
        "export": ("export", "model", "-o", "out"),
    }
    ended = limited.run(*commands[command], cwd=model.parent)
    assert ended.code == 0, ended.err


# --- What transformers loads though it saves it otherwise ------------------------------------------

LOADED = (
    *("head-gpt2", "own-llama", "masks-gpt2", "unnamed-llama", "values-llama", "bare-gpt2"),
    *("further-qwen3.5", "further-glm4-moe"),
)
FULL = ("--method", "svd", "--rank", "64")
CALIBRATED = ("--calibration", "t.txt", "--samples", "2", "--seq-len", "16")


@pytest.fixture
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The odd checkpoint of the test's name, with a tokenizer, beside a text."""
    folder = save_odd(request.node.callspec.params["name"], tmp_path / "model")
    give_words(folder)
    (tmp_path / "t.txt").write_text(TEXT)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOADED)
def test_every_command_takes_what_transformers_loads(name: str, limited: Limited, odd: Path) -> None:
    expected = _logits(odd)
    for command in (
        ("plan", "model"),
        ("eval", "model", "--text", "t.txt", "--window", "16", "--max-tokens", "64"),
        ("generate", "model", "the", "--max-new-tokens", "2"),
        ("compress", "model", *FULL, "-o", "full"),
        ("compress", "model", *FULL, *CALIBRATED, "-o", "calibrated"),
        ("export", "model", "-o", "exported"),
        ("export", "model", "--as", "dense", "-o", "dense"),
    ):
        ended = limited.run(*command, cwd=odd.parent)
        assert ended.code == 0, ended.err
        assert ODDITIES[name].told in ended.err
    for folder in ("full", "calibrated", "exported", "dense"):
        torch.testing.assert_close(_logits(odd.parent / folder), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["head-llama", "own-gpt2", "unnamed-gpt2", "values-llama"])
def test_it_teaches(name: str, limited: Limited, odd: Path) -> None:
    steps = ("--steps", "1", "--window", "16", "--batch", "32")
    for command in (
        ("compress", "model", "--rank", "16", "-o", "out"),
        ("heal", "out", "--teacher", "model", "--data", "t.txt", *steps, "-o", "healed"),
    ):
        ended = limited.run(*command, cwd=odd.parent)
        assert ended.code == 0, ended.err
    found, before, expected = (_logits(odd.parent / f) for f in ("healed", "out", "model"))
    assert (found - expected).norm() < 1.05 * (before - expected).norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["pretraining-bert", "own-bert", "head-bert", "unnamed-masks"])
def test_so_do_encoders(name: str, limited: Limited, odd: Path) -> None:
    expected = _logits(odd, AutoModelForMaskedLM)
    for command in (
        ("compress", "model", *FULL, *CALIBRATED, "-o", "calibrated"),
        ("export", "model", "--quantize", "int8", "-o", "packed"),
        ("export", "calibrated", "--as", "dense", "-o", "dense"),
    ):
        ended = limited.run(*command, cwd=odd.parent)
        assert ended.code == 0, ended.err
    for folder, most in (("calibrated", 1e-3), ("packed", 0.05), ("dense", 1e-3)):
        found = _logits(odd.parent / folder, AutoModelForMaskedLM)
        assert (found - expected).norm() < most * expected.norm()


@torch.no_grad()
def _logits(folder: Path, auto: Any = AutoModelForCausalLM) -> torch.Tensor:
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.arange(5, 37)[None]).logits


@pytest.mark.parametrize("command", ["plan", "compress", "eval", "export"])
def test_what_transformers_would_draw_at_random_is_refused(
    command: str, limited: Limited, model: Path
) -> None:
    """By `plan` already, with its name."""
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    (model.parent / "t.txt").write_text(TEXT)
    more = {"plan": (), "eval": ("--text", "t.txt")}.get(command, ("-o", "out"))
    ended = limited.run(command, "model", *more, cwd=model.parent)
    refused(ended, 4, "missing keys ['model.layers.1.input_layernorm.weight'] of 1")


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "opt"])
def test_types_of_tokens_are_left_out_of_a_prompt(kind: str, limited: Limited, tmp_path: Path) -> None:
    """A decoder computes as in `eval` and calibration, whatever else its tokenizer returns."""
    folder = save_pico(kind, tmp_path / "model")
    give_words(folder)
    command = ("generate", "model", "the protocol", "--max-new-tokens", "4", "--format", "json")
    names = ["input_ids", "attention_mask"]
    texts = []
    for returned in (names, [*names, "token_type_ids"]):
        spoil(folder, "tokenizer_config.json", model_input_names=returned)
        ended = limited.run(*command, cwd=tmp_path)
        assert ended.code == 0, ended.err
        texts.append(json.loads(ended.out)["text"])
    assert texts[0] == texts[1]


def test_types_of_tokens_are_left_out_for_encoders_without_them(
    limited: Limited, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=128, dim=32, hidden_dim=64, n_layers=1, n_heads=4)
    DistilBertModel(config).save_pretrained(tmp_path / "model")
    give_words(tmp_path / "model")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    spoil(tmp_path / "model", "tokenizer_config.json", model_input_names=names)
    rows = ("the,protocol,1", "is,a,2", "the,a,3")
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    ended = limited.run("eval", "model", "--sts", "pairs.csv", cwd=tmp_path)
    assert ended.code == 0, ended.err


# --- Layers that are asked for by name ------------------------------------------------------------


def test_reasons_for_layers_that_cannot_be(limited: Limited, model: Path) -> None:
    """A tied head, an embedding, a norm, and what is no tensor at all."""
    for glob, reason in (
        ("lm_head", "tied to the embedding"),
        ("lm_*", "tied to the embedding"),
        ("*embed_tokens", "no compressible linear layer"),
        ("*.input_layernorm", "no compressible linear layer"),
        ("nothing.*", "globs match module names, for example"),
    ):
        refused(limited.run("plan", "model", "--include", glob, cwd=model.parent), 2, reason)
    refused(limited.run("plan", "model", "--exclude", "lm_head", cwd=model.parent), 2, "tied to the")


def test_reason_for_a_tied_head_that_is_stored(limited: Limited, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(limited.run("plan", "model", "--include", "lm_head", cwd=model.parent), 2, "tied to the")


def test_reason_for_an_integer_layer(limited: Limited, model: Path) -> None:
    import torch

    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(model / "model.safetensors")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused(limited.run("plan", "model", "--include", name, cwd=model.parent), 2, "stored as I8")


# --- Heads over a model that AutoModel makes ------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-classes", "llama-answers"])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--quantize", "int8", "--group", "32"), "folder"),
        (("--base", "int2", "--rank", "4", "--group", "32"), "dense"),
        (("--cf", "2"), "plain"),
    ],
    ids=["few bits", "corrected", "pairs"],
)
def test_the_model_inside_leaves_its_layers_to_the_head(
    options: tuple[str, ...], kind: str, name: str, limited: Limited, tmp_path: Path
) -> None:
    """Placed twice, they lost their biases, or had no dtype to take; of other names, none was found."""
    save_pico(name, tmp_path / "model")
    for command in (
        ("compress", "model", "-o", "out", *options),
        ("export", "out", "-o", "exported", "--as", kind),
    ):
        ended = limited.run(*command, cwd=tmp_path)
        assert ended.code == 0 and "loaded and run" in ended.out, ended.err


# --- Hints of code --------------------------------------------------------------------------------

HINTS: dict[str, Any] = {
    "model_file": "modeling_evil.py",
    "trust_remote_code": True,
    "auto_map": {"AutoConfig": "evil.C"},
    "custom_pipelines": {"x": {"impl": "evil.P"}},
    "code_revision": "main",
    "_attn_implementation_internal": "sdpa",
    "_experts_implementation": "eager",
    "_custom": "evil",
    "init_script": "evil.sh",
    "plugin": ["evil"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "auto_map": {"a": "evil.C"}},
}
INERT: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "some_future_size": 3,
    "some_future_list": [1, 2],
    "flavour": "plain",
    "id2label": {"0": "auto_map", "1": "plugin"},
}


def test_hints_of_code_do_not_travel(limited: Limited, model: Path) -> None:
    spoil(model, "config.json", **HINTS, **INERT)
    spoil(model, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}, x=1)
    assert limited.run("compress", "model", "-o", "out", cwd=model.parent).code == 0
    assert limited.run("export", "out", "-o", "fast", cwd=model.parent).code == 0
    for folder in ("out", "fast"):
        config = json.loads((model.parent / folder / "config.json").read_bytes())
        assert "evil" not in json.dumps({**config, "auto_map": None})
        assert not (HINTS.keys() - {"auto_map", "rope_parameters"}) & config.keys()
        assert config["auto_map"]["AutoConfig"].startswith("modeling_blr.")
        assert config.items() >= INERT.items()
        assert b"evil" not in (model.parent / folder / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("key", HINTS)
def test_hints_by_key(key: str) -> None:
    kept = inert({key: HINTS[key], "a": [{key: HINTS[key]}]}, {"rope_parameters"})
    assert "evil" not in json.dumps(kept)


# --- What is not what it seems --------------------------------------------------------------------


def test_a_tokenizer_that_git_lfs_left_behind(limited: Limited, model: Path) -> None:
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    refused(limited.run("generate", "model", "the", cwd=model.parent), 4, "a pointer of Git LFS")


def test_a_model_without_a_tokenizer_is_told_from_one_whose_does_not_load(
    limited: Limited, model: Path
) -> None:
    (model.parent / "t.txt").write_text(TEXT)
    (model / "tokenizer.json").unlink()
    command = ("eval", "model", "--text", "t.txt")
    refused(limited.run(*command, cwd=model.parent), 4, "model: found no tokenizer; expected")
    (model / "tokenizer.model").write_text("no sentence pieces")
    refused(limited.run(*command, cwd=model.parent), 4, "no tokenizer that loads")


def test_a_table_of_pairs_is_read_before_the_model(limited: Limited, model: Path) -> None:
    (model.parent / "pairs.csv").write_text("the,protocol\n")
    (model / "model.safetensors").write_bytes(b"")
    done = limited.run("eval", "model", "--sts", "pairs.csv", cwd=model.parent)
    refused(done, 4, "0 rows, expected two at least")


def test_a_link_to_nothing_is_no_name_of_the_hub(limited: Limited, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gone").symlink_to("nowhere")
    refused(limited.run("plan", "models/gone", cwd=tmp_path), 4, "models/gone: a link to nothing")
    refused(limited.run("inspect", "models/gone", cwd=tmp_path), 4, "models/gone: found no such folder")


def test_windows_are_as_long_as_a_short_model_has_positions(limited: Limited, model: Path) -> None:
    """Unless they are asked for."""
    (model.parent / "t.txt").write_text(TEXT)
    command = ("eval", "model", "--text", "t.txt", "--format", "json")
    assert json.loads(limited.run(*command, cwd=model.parent).out)["window"] == 64
    refused(limited.run(*command, "--window", "65", cwd=model.parent), 9, "leave --window out")
