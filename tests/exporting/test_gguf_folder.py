"""`blr export --as gguf`: the bytes as llama.cpp reads them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from struct import calcsize, unpack_from
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, save_model, with_tokenizer
from running import Invoke
from safetensors.torch import load_file
from scripting import ROOT
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.heal import heal
from blr.compressor.exporting.gguf_models import tokenizer_values
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.recipe.settings import HealOptions

NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?"}
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
SEQUENCE = {"id": "A", "type_id": 0}
ADDED = ("single_word", "lstrip", "rstrip", "normalized")
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"method": "dense", "quantize": "int8", "group": 64},
    "int4": {"method": "dense", "quantize": "int4"},
    "int3": {"method": "dense", "quantize": "int3", "group": 32},
    "int2": {"method": "dense", "quantize": "int2", "group": 32},
    "q2_k": {"method": "dense", "quantize": "int2", "grid": "q2_k"},
    "q3_k": {"method": "dense", "quantize": "int3", "grid": "q3_k"},
    "q2_k-16": {"method": "svd", "base": "int2", "grid": "q2_k", "rank": 16},
    "int2-16": {"method": "svd", "base": "int2", "group": 32, "rank": 16},
}


@dataclass
class Reader:
    """Reads a file as the description of GGUF says, from its beginning."""

    data: bytes
    at: int = 0

    def one(self, form: str) -> Any:
        value = unpack_from(f"<{form}", self.data, self.at)[0]
        self.at += calcsize(f"<{form}")
        return value

    def text(self) -> str:
        size = self.one("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 9:
            inner, count = self.one("I"), self.one("Q")
            return [self.value(inner) for _ in range(count)]
        return self.text() if kind == 8 else self.one(NUMBERS[kind])

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self.data[:4] == b"GGUF"
        self.at = 4
        assert self.one("I") == 3
        count, entries = self.one("Q"), self.one("Q")
        values = {self.text(): self.value(self.one("I")) for _ in range(entries)}
        infos = []
        for _ in range(count):
            name, axes = self.text(), self.one("I")
            shape = [self.one("Q") for _ in range(axes)][::-1]
            infos.append((name, shape, self.one("I"), self.one("Q")))
        start = -(-self.at // 32) * 32
        assert all(place % 32 == 0 for *_, place in infos)
        return values, {n: weights(self.data[start + p :], shape, k) for n, shape, k, p in infos}


def weights(data: bytes, shape: list[int], kind: int) -> Tensor:
    """A tensor in float32 from where it begins: 2 is Q4_0, 8 is Q8_0, 10 and 11 are Q2_K and Q3_K."""
    count = int(torch.tensor(shape).prod())
    if kind in PLAIN:
        return torch.frombuffer(bytearray(data), dtype=PLAIN[kind], count=count).float().view(shape)
    if kind in (10, 11):
        return superblocks(data, count, kind).view(shape)
    width = 18 if kind == 2 else 34
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8, count=count // 32 * width)
    blocks = blocks.view(-1, width)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    codes = blocks[:, 2:]
    nibbles = torch.cat([codes & 15, codes >> 4], 1).float() - 8
    levels = nibbles if kind == 2 else codes.contiguous().view(torch.int8).float()
    return (levels * scales).view(shape)


def superblocks(data: bytes, count: int, kind: int) -> Tensor:
    """Number by number as llama.cpp reads Q2_K and Q3_K."""
    values, width = [], 84 if kind == 10 else 110
    for start in range(0, count // 256 * width, width):
        block = data[start : start + width]
        if kind == 10:
            scales, low, (d, least) = block[:16], block[16:80], unpack_from("<ee", block, 80)
        else:
            high, low, held, d = (
                block[:32],
                block[32:96],
                block[96:108],
                unpack_from("<e", block, 108)[0],
            )
        for n in range(256):
            part, shift, place, sub = n // 128, n % 128 // 32, n % 32, n // 16
            code = low[32 * part + place] >> 2 * shift & 3
            if kind == 10:
                values.append(d * (scales[sub] & 15) * code - least * (scales[sub] >> 4))
                continue
            code += 4 * (high[place] >> n // 32 & 1)
            k = held[sub % 8] >> 4 * (sub // 8) & 15 | (held[8 + sub % 4] >> 2 * (sub // 4) & 3) << 4
            values.append(d * (k - 32) * (code - 4))
    return torch.tensor(values)


def in_our_order(found: Tensor, name: str, heads: dict[str, int]) -> Tensor:
    """Rows of a head from neighbours, which llama.cpp rotates together, to halves."""
    layer = name.split(".")[2]
    if layer not in heads:
        return found
    return found.unflatten(0, (heads[layer], -1, 2)).transpose(1, 2).reshape(found.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_it_holds_the_values_of_the_checkpoint(name: str, tiny: Path, tmp_path: Path) -> None:
    """Of a Llama, whose queries and keys lie otherwise there; scales of bfloat16 are exact."""
    source = compress_to(tiny, tmp_path / "source", **FORMATS[name])
    folder = export_to(source, tmp_path / "out", kind="gguf", check=False)
    dense = export_to(source, tmp_path / "dense", kind="dense", dtype="float32")
    whole = load_file(dense / "model.safetensors")
    values, tensors = Reader((folder / "model.gguf").read_bytes()).read()
    heads = {"attn_q": values["llama.attention.head_count"]}
    heads["attn_k"] = values["llama.attention.head_count_kv"]
    adapter = folder / "adapter.gguf"
    factors = Reader(adapter.read_bytes()).read()[1] if adapter.exists() else {}
    names = json.loads((folder / "blr_layers.json").read_bytes())
    assert len(factors) == (2 * len(names) if name.endswith("-16") else 0)
    short = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "mlp.down_proj": "ffn_down"}
    for block in range(4):
        for ours, theirs in short.items():
            stored = f"blk.{block}.{theirs}.weight"
            found = tensors[stored]
            if factors:
                found = found + factors[f"{stored}.lora_b"] @ factors[f"{stored}.lora_a"]
            expected = whole[f"model.layers.{block}.{ours}.weight"]
            found = in_our_order(found, stored, heads)
            assert float((found - expected).norm() / expected.norm()) < TOLERANCES[torch.float32]
    assert torch.equal(tensors["token_embd.weight"], whole["model.embed_tokens.weight"])
    assert "output.weight" not in tensors  # tied


def test_calibration_and_healing_stay_on_the_grid(tiny: Path, tmp_path: Path) -> None:
    """Refits of blocks and trained scales: the export finds a unit for every superblock."""
    text, progress = str(ROOT / "tests/data/calibration.txt"), Progress(quiet=True)
    given = Settings("tiny", calibration=text, device="cpu", force=True)
    small = {"samples": 4, "seq_len": 32, "refit": 1}
    compress(tiny, make_recipe(**FORMATS["q2_k"], **small), tmp_path / "fit", given, progress)
    training = {"data": (text,), "window": 32, "batch": 64, "own_tokens": 400, "steps": 8}
    options = HealOptions("fit", "tiny", device="cpu", force=True, **training)
    heal(tmp_path / "fit", tiny, tmp_path / "healed", options, progress)
    for name in ("fit", "healed"):
        export_to(tmp_path / name, tmp_path / f"{name}-gguf", kind="gguf", check=False)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("fit", "healed"))
    trained = [name for name in before if "down_proj" in name and "_scale" in name]
    assert any(not torch.equal(before[name], after[name]) for name in trained)


def test_it_holds_the_tokenizer(tiny: Path, tmp_path: Path) -> None:
    """Tokens, merges, how text is cut, what is put before it, and the template of a chat."""
    source = compress_to(tiny, tmp_path / "source", **FORMATS["int4"])
    told = json.loads((source / "tokenizer_config.json").read_bytes())
    (source / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": "{{ x }}"}))
    (source / "blr_manifest.json").unlink()  # of the folder as it was
    folder = export_to(source, tmp_path / "out", kind="gguf", check=False)
    values, _ = Reader((folder / "model.gguf").read_bytes()).read()
    table = json.loads((tiny / "tokenizer.json").read_bytes())["model"]
    said = {k.removeprefix("tokenizer.ggml."): v for k, v in values.items()}
    assert {text: n for n, text in enumerate(said["tokens"])}.items() >= table["vocab"].items()
    assert said["merges"] == [" ".join(pair) for pair in table["merges"]]
    assert (said["model"], said["pre"], said["eos_token_id"]) == ("gpt2", "gpt-2", 0)
    assert said["token_type"][0] == 3 and not said["add_bos_token"]
    assert values["tokenizer.chat_template"] == "{{ x }}"


def test_what_llama_cpp_has_no_form_of_is_refused(
    tiny: Path, tmp_path: Path, invoke: Invoke, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grid, a type of models, a scaling of positions, a tokenizer: each before any work."""
    curved = compress_to(
        tiny, tmp_path / "curved", method="dense", quantize="int3", grid="curved", group=32
    )
    capsys.readouterr()
    code, _, err = invoke("export", curved, "-o", tmp_path / "out", "--as", "gguf")
    assert code == 2 and "--grid uniform" in err and err.count("\n") == 1
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    yarn["original_max_position_embeddings"] = 64
    for kind, changed, reason in (
        ("olmo", {}, "a model of type olmo"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("qwen3", {"rope_parameters": yarn}, "rotary positions of type yarn"),
    ):
        known = {**MODELS, "olmo": ("OlmoConfig", MODELS["llama"][1], "OlmoForCausalLM")}
        config, settings, cls = known[kind]
        sizes = {"vocab_size": 4096, "intermediate_size": 64}
        save_model(config, {**settings, **sizes, **changed}, cls, tmp_path / kind)
        with_tokenizer(tmp_path / kind, tiny)
        source = compress_to(tmp_path / kind, tmp_path / f"{kind}-4", **FORMATS["int4"])
        capsys.readouterr()
        code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "gguf")
        assert code == 9 and reason in err and err.count("\n") == 1
    source = compress_to(tiny, tmp_path / "source", **FORMATS["int4"])
    table = json.loads((source / "tokenizer.json").read_bytes())
    table["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}
    (source / "tokenizer.json").write_text(json.dumps(table))
    (source / "blr_manifest.json").unlink()
    capsys.readouterr()
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--as", "gguf")
    assert code == 9 and "Metaspace" in err and err.count("\n") == 1


def test_a_tokenizer_of_characters_is_one_of_sentencepiece(tmp_path: Path) -> None:
    """As those of Llama 2: merges are tried in the order of tokens, bytes stand for the rest."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "▁", "▁a", "ab"]
    template: dict[str, Any] = {"type": "TemplateProcessing"}
    template["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": SEQUENCE}]
    template["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    template["pair"] = template["single"] + [{"Sequence": {**SEQUENCE, "id": "B"}}]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    table = {
        "version": "1.0",
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces],
        },
        "post_processor": template,
        "added_tokens": [
            {"id": n, "content": tokens[n], "special": True, **dict.fromkeys(ADDED, False)}
            for n in range(3)
        ],
        "model": {
            **{"type": "BPE", "vocab": {text: n for n, text in enumerate(tokens)}, "unk_token": "<unk>"},
            **{"byte_fallback": True, "fuse_unk": True, "merges": [["▁", "a"], ["a", "b"]]},
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    config, settings, cls = MODELS["llama"]
    save_model(config, {**settings, "vocab_size": 12}, cls, tmp_path)
    values = tokenizer_values(tmp_path, 12)
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    assert said["model"] == "llama" and said["tokens"] == [*tokens, "[PAD9]", "[PAD10]", "[PAD11]"]
    assert said["token_type"] == [2, 3, 3, 6, 1, 1, 1, 1, 1, 5, 5, 5]
    assert said["scores"] == sorted(said["scores"], reverse=True)
    assert (said["bos_token_id"], said["add_bos_token"], said["add_eos_token"]) == (1, True, False)
    assert said["add_space_prefix"]
