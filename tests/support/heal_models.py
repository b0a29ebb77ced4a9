"""A pico decoder with a tokenizer of characters, compressed, and texts for it to be healed on."""

from __future__ import annotations

import random
from pathlib import Path

from pico import save_pico
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.recipe.schema import Recipe

QUIET = Progress(quiet=True)
END = "\x00"


def save_characters(
    folder: Path, order: range = range(128), around: str = "$A", **settings: object
) -> None:
    """A tokenizer whose ids are the characters of ASCII, in `order`; of `around` "$A" stands for a text,
    each other character is put before or behind it. settings: of the tokenizer's own."""
    vocabulary = {chr(character): number for number, character in enumerate(order)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    before, behind = around.split("$A")
    if before or behind:
        special = [(token, vocabulary[token]) for token in dict.fromkeys(before + behind)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind], special_tokens=special
        )
    named = {"eos_token": END, "unk_token": END, **settings}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def save_dense(folder: Path, name: str = "llama-tied", around: str = "$A") -> Path:
    """A pico decoder that reads characters."""
    save_pico(name, folder)
    save_characters(folder, around=around)
    return folder


def compress_pico(dense: Path, output: Path, method: str = "blast", **settings: object) -> Path:
    """`dense` at CF 1.5 by a few rounds."""
    recipe = Recipe(method=method, cf=1.5, **{"rounds": 5, **settings})
    compress(dense, recipe, output, Settings("dense", check=False), QUIET)
    return output


def write_text(path: Path, characters: int = 4000, seed: int = 0) -> Path:
    """Random words."""
    rng = random.Random(seed)
    words = ("".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(characters))
    path.write_text(" ".join(words)[:characters])
    return path
