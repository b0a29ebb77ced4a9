"""Nothing wrong passes silently: commands on damaged outputs and wrong weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import save_model, save_pico, with_tokenizer
from running import Invoke
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from blr.compressor.checkpoint.header import read_header
from blr.compressor.workspace.manifest import DIGEST, MANIFEST, read_manifest

SHARD = "model.safetensors"
LAYER = "model.layers.0.mlp.up_proj"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs that must not be changed, by kind."""
    folder = tmp_path_factory.mktemp("whole")
    made = compress_to(tiny, folder / "compressed", method="svd", cf=1.25)
    packed = export_to(made, folder / "packed", quantize="int8", context=64)
    return {"compressed": made, "packed": packed}


@pytest.fixture(scope="module")
def encoder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense encoder with a tokenizer."""
    return with_tokenizer(save_pico("bert", tmp_path_factory.mktemp("encoder") / "bert"), tiny)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The protocol is described in this document. " * 4)
    return path


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A damage to the tensors of an output whose manifest is gone, as of a save by another tool."""

    def damage(folder: Path) -> None:
        held = load_file(folder / SHARD)
        change(held)
        save_file(held, folder / SHARD, metadata={"format": "pt"})
        (folder / MANIFEST).unlink()

    return damage


def config(change: Callable[[dict[str, Any]], object]) -> Damage:
    """A damage to config.json of an output whose manifest is gone."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / "config.json").read_bytes())
        change(table["blr"])
        (folder / "config.json").write_text(json.dumps(table))
        (folder / MANIFEST).unlink()

    return damage


def patched(change: Callable[[bytearray], object], name: str = SHARD) -> Damage:
    """Other bytes of the same length under the same manifest."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        change(data)
        (folder / name).write_bytes(data)

    return damage


def flip_last_bit(data: bytearray) -> None:
    data[-1] ^= 1


def relabel(data: bytearray) -> None:
    at = data.index(b'"BF16"')
    data[at : at + 6] = b'"F16" '


def swap_names(data: bytearray) -> None:
    """Two tensors of one shape exchange their names in the header."""
    one, two = (f"model.layers.{n}.mlp.up_proj.U".encode() for n in (0, 1))
    a, b = data.index(one), data.index(two)
    data[a : a + len(one)], data[b : b + len(two)] = two, one


def swap_factors(folder: Path) -> None:
    """Two tensors of one shape exchange their values."""
    entries = read_header(folder / SHARD).entries
    one, two = (entries[f"model.layers.{n}.mlp.up_proj.U"] for n in (0, 1))
    data = bytearray((folder / SHARD).read_bytes())
    data[one.start : one.end], data[two.start : two.end] = (
        data[two.start : two.end],
        data[one.start : one.end],
    )
    (folder / SHARD).write_bytes(data)


def change_fact(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"revision": null', b'"revision": "ab"'))


# damage -> the commands that meet it and a fragment of what they say, beside exit code 4
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "flipped bit": (patched(flip_last_bit), "eval generate export inspect--verify verify", "SHA-256"),
    "swapped factors": (swap_factors, "eval generate export inspect--verify verify", "SHA-256"),
    "relabelled": (patched(relabel), "eval eval--no-verify generate export inspect verify", ""),
    "swapped names": (
        patched(swap_names),
        "eval--no-verify generate--no-verify export inspect",
        "header",
    ),
    "truncated": (lambda out: os.truncate(out / SHARD, 10_000), "eval--no-verify export inspect", ""),
    "changed config": (
        patched(
            lambda data: data.__setitem__(slice(None), data.replace(b'"svd"', b'"SVD"', 1)),
            "config.json",
        ),
        "eval generate export inspect",
        "config.json",
    ),
    "changed record": (
        patched(
            lambda data: data.__setitem__(slice(None), data.replace(b"0.", b"1.", 1)), "blr_layers.json"
        ),
        "inspect export eval",
        "blr_layers.json",
    ),
    "changed fact": (change_fact, "eval generate export inspect verify", MANIFEST),
    "tensor left out": (
        tensors(lambda held: held.pop("model.layers.1.input_layernorm.weight")),
        "eval generate export",
        "input_layernorm",
    ),
    "factor left out": (
        tensors(lambda held: held.pop(f"{LAYER}.V")),
        "eval generate export",
        f"{LAYER}.V",
    ),
    "tensor too many": (
        tensors(lambda held: held.update(more=torch.ones(2))),
        "eval generate export",
        "more",
    ),
    "factor of another shape": (
        tensors(lambda held: held.update({f"{LAYER}.V": held[f"{LAYER}.V"][:, 1:].contiguous()})),
        "eval generate export",
        f"{LAYER}",
    ),
    "empty layer table": (config(lambda table: table["layers"].clear()), "eval generate export", ""),
    "layer not in the table": (config(lambda table: table["layers"].pop(LAYER)), "eval generate", LAYER),
}
CASES = [(name, command) for name, (_, commands, _) in DAMAGES.items() for command in commands.split()]


def call(invoke: Invoke, command: str, folder: Path, text: Path) -> tuple[int, str, str]:
    name, dash, option = command.partition("--")
    more = [dash + option] if option else []
    arguments = {
        "eval": ["--text", text, "--window", 32, "--quiet"],
        "generate": ["The", "--max-new-tokens", 4],
        "export": ["-o", folder.parent / "exported", "--quiet"],
        "inspect": [],
        "verify": [],
    }
    return invoke(name, folder, *arguments[name], *more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("damage", "command"), CASES)
def test_damage_is_refused(
    damage: str, command: str, whole: dict[str, Path], text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = shutil.copytree(whole["compressed"], tmp_path / "out")
    harm, _, fragment = DAMAGES[damage]
    harm(folder)
    code, out, err = call(invoke, command, folder, text)
    assert (code, out) == (10 if command == "verify" else 4, "")
    assert err.count("\n") == 1 and fragment in err
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("command", ["eval--no-verify", "generate--no-verify", "inspect"])
def test_hashes_of_weights_are_left_out_on_request(
    command: str, whole: dict[str, Path], text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = shutil.copytree(whole["compressed"], tmp_path / "out")
    patched(flip_last_bit)(folder)
    assert call(invoke, command, folder, text)[0] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["eval", "generate", "export", "inspect--verify", "verify"])
def test_outputs_of_the_format_before_are_read(
    command: str, whole: dict[str, Path], text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = shutil.copytree(whole["compressed"], tmp_path / "out")
    manifest = read_manifest(folder)
    del manifest[DIGEST]
    for listing in manifest["files"].values():
        listing.pop("header_sha256", None)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 1}, indent=2))
    assert call(invoke, command, folder, text)[0] == 0
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)
    patched(flip_last_bit)(folder)
    assert call(invoke, command, folder, text)[0] == (10 if command == "verify" else 4)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_dropped_quantize_entry_is_refused(
    command: str, whole: dict[str, Path], text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = shutil.copytree(whole["packed"], tmp_path / "out")
    config(lambda table: table["export"].pop("quantize"))(folder)
    code, _, err = call(invoke, command, folder, text)
    assert code == 4 and "missing keys" in err


SHIPPED: dict[str, tuple[str, Damage]] = {
    "tensor left out": ("compressed", DAMAGES["tensor left out"][0]),
    "tensor too many": ("compressed", DAMAGES["tensor too many"][0]),
    "empty layer table": ("compressed", DAMAGES["empty layer table"][0]),
    "dropped quantize": ("packed", config(lambda table: table["export"].pop("quantize"))),
}


@pytest.mark.parametrize("damage", SHIPPED)
def test_the_shipped_code_refuses_it_too(
    damage: str, whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, harm = SHIPPED[damage]
    folder = shutil.copytree(whole[kind], tmp_path / "out")
    harm(folder)
    table = json.loads((folder / "config.json").read_bytes())
    cls = get_class_from_dynamic_module(table["auto_map"]["AutoModelForCausalLM"], str(folder))
    with pytest.raises(ValueError, match=r"(missing|unexpected) keys"):
        cls.from_pretrained(folder)
    assert cls.from_pretrained(folder, output_loading_info=True)[1]


def test_a_head_that_the_checkpoint_never_had_is_no_fault(tiny: Path, tmp_path: Path) -> None:
    import transformers

    from blr.compressor import register

    register()

    output = compress_to(save_pico("bert", tmp_path / "bert"), tmp_path / "out", method="svd", cf=1.25)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(output)
    assert type(model).__name__ == "BlrBertForSequenceClassification"
    tensors(lambda held: held.pop("encoder.layer.0.output.dense.bias"))(output)
    with pytest.raises(ValueError, match=r"output\.dense\.bias"):
        transformers.AutoModelForSequenceClassification.from_pretrained(output)


def set_value(value: float) -> Damage:
    return tensors(lambda held: held[f"{LAYER}.U"].view(-1).__setitem__(3, value))


def overflow(held: dict[str, Any]) -> None:
    for factor in "UV":
        held[f"{LAYER}.{factor}"] *= 1e22


NUMBERS = {
    "nan": (set_value(float("nan")), f"{LAYER}.U"),
    "inf": (set_value(float("inf")), f"{LAYER}.U"),
    "minus inf": (set_value(float("-inf")), f"{LAYER}.U"),
    "overflow": (tensors(overflow), LAYER),
    "dense nan": (
        tensors(lambda held: held["model.norm.weight"].fill_(float("nan"))),
        "model.norm.weight",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["eval", "generate", "export"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_weights_that_no_model_can_have(
    numbers: str, command: str, whole: dict[str, Path], text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = shutil.copytree(whole["compressed"], tmp_path / "out")
    harm, name = NUMBERS[numbers]
    harm(folder)
    code, out, err = call(invoke, command, folder, text)
    assert (code, out) == (7, "") and name in err and err.count("\n") == 1


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_activations_that_overflow(
    command: str, sampling: list[str], tiny: Path, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """Finite weights, logits that are not."""
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    held = load_file(folder / SHARD)
    held["model.norm.weight"].fill_(3e38)
    save_file(held, folder / SHARD, metadata={"format": "pt"})
    if command == "eval":
        code, _, err = call(invoke, command, folder, text)
    else:
        code, _, err = invoke("generate", folder, "The", *sampling)
    assert code == 7 and ("log-likelihood" if command == "eval" else "logits") in err


def test_sts_without_a_correlation(encoder: Path, tmp_path: Path, invoke: Invoke) -> None:
    pairs = tmp_path / "sts.csv"
    pairs.write_text("a,b,1.0\nb,c,1.0\nc,d,1.0\n")  # tokens below the pico vocabulary
    code, _, err = invoke("eval", encoder, "--sts", pairs, "--quiet")
    assert code == 7 and "1 different scores" in err


def test_sts_of_a_checkpoint_with_a_head(tiny: Path, tmp_path: Path, invoke: Invoke) -> None:
    """Its head is left over and the pooler, which it never had, is missing: neither is a fault."""
    folder = with_tokenizer(save_pico("bert-mlm", tmp_path / "bert"), tiny)
    pairs = tmp_path / "sts.csv"
    pairs.write_text("a,b,1.0\nb,qb,2.0\nc,d,1.5\n")
    assert invoke("eval", folder, "--sts", pairs, "--quiet")[0] == 0
    held = load_file(folder / SHARD)
    del held["bert.embeddings.LayerNorm.weight"]
    save_file(held, folder / SHARD, metadata={"format": "pt"})
    code, _, err = invoke("eval", folder, "--sts", pairs, "--quiet")
    assert code == 4 and "embeddings.LayerNorm.weight" in err


def test_tokens_without_embeddings(encoder: Path, tmp_path: Path, invoke: Invoke) -> None:
    pairs = tmp_path / "sts.csv"
    pairs.write_text("the protocol,b,1.0\nb,c,2.0\n")
    code, _, err = invoke("eval", encoder, "--sts", pairs, "--quiet")
    assert code == 4 and "for a model with 128 embeddings" in err


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_an_encoder_continues_no_text(command: str, encoder: Path, text: Path, invoke: Invoke) -> None:
    code, out, err = call(invoke, command, encoder, text)
    assert (code, out) == (4, "") and "BertModel, which continues no text" in err


@pytest.mark.parametrize("name", ["GPTNeoX", "Bert"])
def test_a_decoder_is_one_by_what_its_class_computes(
    name: str, tiny: Path, tmp_path: Path, text: Path, invoke: Invoke
) -> None:
    """transformers writes `is_decoder: false` for GPT-NeoX, which looks back alone all the same."""
    size = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    settings = {**size, "vocab_size": 4096, "is_decoder": False}
    kind = {"GPTNeoX": "GPTNeoXForCausalLM", "Bert": "BertLMHeadModel"}[name]
    save_model(f"{name}Config", settings, kind, dense := tmp_path / "dense")
    with_tokenizer(dense, tiny)
    for folder in (dense, compress_to(dense, tmp_path / "small", method="svd", cf=2)):
        code, _, err = invoke("eval", folder, "--text", text, "--quiet")
        assert code == (0 if name == "GPTNeoX" else 4), err
        assert ("of is_decoder false" in err) == (name == "Bert")


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_an_exported_encoder_continues_no_text(
    command: str, encoder: Path, text: Path, tmp_path: Path, invoke: Invoke
) -> None:
    code, out, err = call(invoke, command, export_to(encoder, tmp_path / "out"), text)
    assert (code, out) == (4, "") and "continues no text" in err


def test_verify_of_a_folder_that_cannot_be_listed(
    whole: dict[str, Path], tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(whole["compressed"], tmp_path / "out")
    (folder / "closed").mkdir()
    listed = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", refuse)
    code, _, err = invoke("verify", folder)
    assert code == 10 and "closed: a folder that cannot be listed (Permission denied)" in err
