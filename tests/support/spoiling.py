"""Makes checkpoints a little wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers


def words_tokenizer(*, normalizer: Any = None, split: str | None = None) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(("[UNK]", "the", "protocol", "is", "a"))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if split is not None:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def give_words(folder: Path) -> None:
    """Give the model in `folder` a tokenizer of words, whatever its type."""
    words_tokenizer().save(str(folder / "tokenizer.json"))
    kind = "PreTrainedTokenizerFast"
    spoil(folder, "tokenizer_config.json", tokenizer_class=kind, pad_token="[UNK]")


def spoil(folder: Path, name: str, **values: Any) -> None:
    """Set values of a JSON file, top-level keys."""
    path = folder / name
    table = json.loads(path.read_bytes()) if path.exists() else {}
    path.write_text(json.dumps({**table, **values}))
