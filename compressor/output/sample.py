"""The text on which the loss of a decoder is measured: some thousand tokens, in windows as `blr eval`
cuts them, no more than a CPU reads within a minute or two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import printable
from blr.compressor.checkpoint.context import context_of, of_text
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.engine import read_text
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.loading.native import read_context
from blr.compressor.loading.smoke_run import plain_tokens
from blr.compressor.loading.streamed import is_small
from blr.compressor.loading.tokenizer import check_ids
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.beginning import Beginning, beginning_of, begun, room_in
from blr.compressor.text.own import OwnText, continued
from blr.compressor.text.reading import read_first_text
from blr.compressor.text.windows import HELD_TOKENS, check_known

WINDOW = 512  # tokens, as of `blr eval`
WORK = 2e12  # parameters times tokens of a pass: about a minute of a few cores
LEAST = 128  # tokens that say anything
OWN = 1024  # tokens of the model's own text
LENGTHS = {True: 64, False: 16}  # of its samples, by whether the model is small: every token is a pass
OWN_BYTES = 1 << 32  # of weights, which every pass reads: larger models write none
OWN_LOGITS = 1 << 26  # that are kept of own text


@dataclass(frozen=True)
class Text:
    """Tokens in `windows` [n, w] (int64), each with the `beginning` of a text; `what` they are in words;
    at which token of their text they begin as `first`, where they are a piece of one; whether the
    model's `own`."""

    windows: Tensor
    what: str
    beginning: Beginning = ()
    first: int | None = None
    own: bool = False

    @property
    def tokens(self) -> int:
        """Without the beginnings."""
        return self.windows.numel() - len(self.windows) * len(self.beginning)


def most_tokens(source: Source) -> int:
    """That a pass of the model may read; 0 for one so large that they would say nothing."""
    parameters = sum(entry.parameters for entry in source.entries.values())
    most = min(HELD_TOKENS, int(WORK / max(parameters, 1)))
    return most if most >= LEAST else 0


def calibration_text(source: Source, recipe: Recipe, name: str | None, offline: bool) -> Text | None:
    """What no fit reads of the text of a decoder's calibration; None without one, and if it is the
    model's own or too short.

    Raises as `fitting.engine.read_text`.
    """
    if name is None:
        return None
    seq_len = min(recipe.seq_len, read_context(source))
    tokenizer, found = read_text(source, recipe.samples, seq_len, name, True, offline)
    if found is None or found.held is None:
        return None
    beginning = beginning_of(tokenizer)
    return held_text(_rows(found.held, source, beginning), beginning, name, source, found.first)


def held_text(
    windows: Tensor, beginning: Beginning, name: str, source: Source, first: int | None = None
) -> Text | None:
    """`windows` [n, w], each with the `beginning`, of the text `name`, in which they begin at token
    `first`; None for too few tokens.

    Raises InputError for tokens that the model does not have.
    """
    if windows.numel() < LEAST:
        return None
    check_known((windows,), of_text(source.config).get("vocab_size"), name)
    found = Text(windows.long(), "", beginning, first)
    place = "" if first is None else f", from token {first:,} on"
    what = f"{found.tokens:,} held-back tokens of {printable(Path(name).name)}{place}"
    return Text(windows.long(), what, beginning, first)


def file_text(path: Path, source: Source) -> Text:
    """The beginning of a text.

    Raises InputError for one that cannot be read, or is too short.
    """
    start = read_first_text(path)
    tokenizer = load_tokenizer(source.folder, text=start)
    ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise InputError(f"{path}: {len(ids)} tokens, expected at least 2; give a longer text")
    beginning = beginning_of(tokenizer)
    windows = _rows(torch.tensor(ids), source, beginning)
    check_known((windows,), of_text(source.config).get("vocab_size"), str(path))
    found = Text(windows, "", beginning)
    what = f"the first {found.tokens:,} tokens of {printable(path.name)}"
    return Text(windows, what, beginning, 0)


def _rows(tokens: Tensor, source: Source, beginning: Beginning) -> Tensor:
    """Whole windows [n, w] of the beginning of one text [n], with what begins each."""
    tokens = tokens[: max(most_tokens(source), LEAST)]
    window = min(WINDOW, read_context(source), len(tokens) + len(beginning))
    room = room_in(max(window, 1 + len(beginning)), beginning)
    return begun(tokens[: len(tokens) // room * room].view(-1, room), beginning).long()


def writes(source: Source) -> bool:
    """Whether the model is small enough to write text within minutes."""
    return sum(entry.nbytes for entry in source.entries.values()) <= OWN_BYTES


def own_text(model: Any, source: Source) -> Text:
    """What the model in `source` writes, in samples that begin as a text and go on from a plain token at
    random."""
    config, beginning = model.config.get_text_config(), _beginning(source.folder)
    length = min(LENGTHS[is_small(source)] + len(beginning), context_of(model.config.to_dict()))
    count = max(min(OWN, OWN_LOGITS // config.vocab_size) // (length - len(beginning)), 1)
    usable = plain_tokens(model.config)
    generator = torch.Generator().manual_seed(0)
    starts = usable[torch.randint(len(usable), (count, 1), generator=generator)]
    prompts = begun(starts, beginning)
    check_ids(model, prompts)
    windows = continued(model, prompts, 0, OwnText(count * length, length, 0, "")).long()
    found = Text(windows, "", beginning, own=True)
    return Text(windows, f"{found.tokens:,} tokens that the model wrote itself", beginning, own=True)


def _beginning(folder: Path) -> Beginning:
    """Of a text; nothing where there is no tokenizer that loads."""
    try:
        return beginning_of(load_tokenizer(folder))
    except InputError:
        return ()
