"""Calibration windows of the model's own text, alone or mixed with the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.checkpoint.journal import Journal, canonical_json
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.load import load_model
from blr.compressor.progress import Progress
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.own import ROOM, OwnText, working_dtype, write_own_text
from blr.compressor.text.reading import BATCH, OWN, Calibration, digest_batches
from blr.compressor.text.windows import interleaved


def with_own_text(
    source: Source, recipe: Recipe, tokenizer: Any, seq_len: int, text: Calibration | None,
    device: torch.device, journal: Journal, progress: Progress,
) -> Calibration:  # fmt: skip
    """Windows of `seq_len` tokens, `recipe.samples` at most: the share `recipe.mix` of them is own
    text, all if there is no `text`.

    To write it the whole model is loaded, once; what it wrote is kept in `journal`.
    """
    count = recipe.samples if text is None else max(1, round(recipe.mix * recipe.samples))
    parts = [_write(source, recipe, tokenizer, seq_len, count, device, journal, progress)]
    if text is not None and count < recipe.samples:
        parts.insert(0, torch.cat(text.ids)[: recipe.samples - count])
    ids = list(interleaved(parts).split(BATCH))
    return Calibration(ids, masks := [torch.ones_like(part) for part in ids], digest_batches(ids, masks))


def _write(
    source: Source, recipe: Recipe, tokenizer: Any, seq_len: int, count: int, device: torch.device,
    journal: Journal, progress: Progress,
) -> Tensor:  # fmt: skip
    """[count, seq_len]; the token at random that each sample starts from is left out where the context
    has room for that."""
    model = load_model(
        source.folder, "AutoModelForCausalLM", dtype=working_dtype(device), device=str(device)
    )
    context = getattr(model.config, "max_position_embeddings", None) or seq_len + ROOM
    length = min(seq_len + ROOM, context)
    wanted = OwnText(count * length, length, recipe.seed, author_of(source))
    rows = write_own_text(model, tokenizer, wanted, journal, progress)
    return rows[:count, length - seq_len :].long()


def author_of(source: Source) -> str:
    """SHA-256 over the model's weights."""
    found = {name: source.sha256(entry) for name, entry in source.entries.items()}
    return hashlib.sha256(canonical_json(found)).hexdigest()


def is_own(name: str) -> bool:
    """Whether a calibration's name asks for own text: "self", unless there is such a file."""
    return name == OWN and not Path(name).exists()
