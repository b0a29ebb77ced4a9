"""What a GGUF file says of a tokenizer, by the keys that llama.cpp reads."""

import json
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.quoting import quote
from blr.compressor.loading.load import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
REMEDY = "take --as mlx, vllm or dense"
# How llama.cpp calls the ways in which text is cut into words, by regular expression or by kind
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_WORDS += r"|\s+(?!\S)|\s+"
CUTS = {
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _WORDS % r"\p{N}": "qwen2",
    "ByteLevel": "gpt-2",
    "Digits ByteLevel": "smollm",
}
WHOLE_WORDS = ("llama-bpe",)  # those where a word that is a token is not cut


def tokenizer_values(folder: Path, size: int) -> dict[str, object]:
    """The tokenizer in `folder`, of a model with `size` tokens, and its chat template. Raises
    CapabilityError for one that llama.cpp does not have."""
    tokenizer: Any = load_tokenizer(folder)
    if not tokenizer.is_fast or len(tokenizer) > size:
        said = f"{len(tokenizer)} tokens, not fast or more than the {size} of the model"
        raise CapabilityError(f"--as gguf: the tokenizer of {folder} has {said}; {REMEDY}")
    table = json.loads(tokenizer.backend_tokenizer.to_str())  # its class may differ from its file
    values = _vocabulary(folder, table, size)
    if values["model"] == "llama":
        values["add_space_prefix"] = tokenizer.tokenize("a") == ["▁a"]
    ids = {name: getattr(tokenizer, f"{short}_token_id") for short, name in SPECIAL.items()}
    values |= {f"{name}_token_id": token for name, token in ids.items() if token is not None}
    read = tokenizer("a").input_ids
    for name, token in (("bos", read[0]), ("eos", read[-1])):
        values[f"add_{name}_token"] = token == ids[name] is not None
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    chat = {"tokenizer.chat_template": template} if template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | chat


def _vocabulary(folder: Path, table: dict[str, Any], size: int) -> dict[str, object]:
    """Tokens and how text becomes tokens: merges of bytes, or of characters in the order of tokens."""
    model, (texts, kinds) = table["model"], _tokens(table, size)
    values: dict[str, Any] = {"tokens": texts, "token_type": kinds}
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return values | {"model": "llama", "scores": [float(-n) for n in range(size)]}
    if model["type"] == "BPE" and (cut := _cut(table)):
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return values | {"model": "gpt2", "pre": cut, "merges": merges}
    told = quote(table.get("pre_tokenizer"), 120)[1:-1]
    raise CapabilityError(
        f"--as gguf: the tokenizer of {folder} ({model['type']}, {told}) is none that llama.cpp has, "
        f"expected one that cuts text as those of Llama, Qwen, GPT-2 or SmolLM; {REMEDY}"
    )


def _cut(table: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a byte-level tokenizer cuts text; None if it has none."""
    before = table.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = " ".join(step.get("type", "") for step in steps)
    pattern = steps[0].get("pattern", {}).get("Regex")
    cut = CUTS.get(pattern if kinds == "Split ByteLevel" else kinds)
    whole = bool(table["model"].get("ignore_merges")) == (cut in WHOLE_WORDS)
    return cut if whole and not steps[-1].get("add_prefix_space") else None


def _tokens(table: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """The text and type of each of `size` tokens."""
    texts = [f"[PAD{n}]" for n in range(size)]
    kinds = [UNUSED] * size
    unknown = table["model"].get("unk_token")
    fallback = table["model"].get("byte_fallback")
    for text, n in table["model"]["vocab"].items():
        is_byte = fallback and len(text) == 6 and text.startswith("<0x")
        texts[n], kinds[n] = text, BYTE if is_byte else UNKNOWN if text == unknown else NORMAL
    for added in table.get("added_tokens", []):
        n = added["id"]
        if kinds[n] != UNKNOWN:
            texts[n], kinds[n] = added["content"], CONTROL if added["special"] else USER
    return texts, kinds
