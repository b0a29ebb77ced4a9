"""Calibration windows of the model's own text, alone or mixed with the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.work import Work
from blr.compressor.loading.compute_dtype import load_computing
from blr.compressor.text.own import ROOM, OwnText, write_own_text
from blr.compressor.text.reading import (
    OWN,
    Beginning,
    Calibration,
    beginning_of,
    begun,
    packed_calibration,
)
from blr.compressor.text.windows import interleaved
from blr.compressor.workspace.journal import canonical_json


def with_own_text(work: Work, tokenizer: Any, seq_len: int, text: Calibration | None) -> Calibration:
    """Windows of `seq_len` tokens, `samples` of the recipe at most: the share `mix` of them is own
    text, all if there is no `text`.

    To write it the whole model is loaded, once; what it wrote is kept in the journal.
    """
    samples = work.recipe.samples
    count = samples if text is None else max(1, round(work.recipe.mix * samples))
    beginning = beginning_of(tokenizer)
    parts = [_write(work, tokenizer, seq_len, count, beginning)]
    if text is not None and count < samples:
        parts.insert(0, torch.cat(text.ids)[: samples - count])
    return packed_calibration(interleaved(parts), beginning)


def _write(work: Work, tokenizer: Any, seq_len: int, count: int, beginning: Beginning) -> Tensor:
    """[count, seq_len] with the beginning of a text; the token at random that each sample starts from is
    left out where the context has room for that."""
    folder, device = work.source.folder, work.target
    model = load_computing(folder, "AutoModelForCausalLM", device)
    length = min(seq_len + ROOM, context_of(model.config.to_dict()))
    wanted = OwnText(count * length, length, work.recipe.seed, author_of(work.source))
    processes = work.processes
    share = processes.rank, processes.count
    rows = write_own_text(model, tokenizer, wanted, work.journal, work.progress, share, processes.wait)
    return begun(rows[:count, len(beginning) + length - seq_len :], beginning).long()


def author_of(source: Source) -> str:
    """SHA-256 over the model's weights."""
    found = {name: source.sha256(entry) for name, entry in source.entries.items()}
    return hashlib.sha256(canonical_json(found)).hexdigest()


def is_own(name: str) -> bool:
    """Whether a calibration's name asks for own text: "self", unless there is such a file."""
    return name == OWN and not Path(name).exists()
