"""Cuts long texts into token windows of fixed length, in an order that follows from a seed.

There is no state: window k of a stream is the same whenever and in whichever process it is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blr.compressor.base.errors import InputError
from blr.compressor.text.reading import (
    HELD_SHARE,
    LEAST_WINDOWS,
    Beginning,
    begun,
    idle_predictions,
    room_in,
    tokenized,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_MOST = 64  # most windows that are held back
SEEDS = 1 << 63  # number of seeds that a generator takes
PLAIN_READS = 3  # epochs before tokens are replaced


class Stream:
    """Windows of `window` tokens, with the tokenizer's `beginning`, of rows [n, l], or of one text as a
    single row.

    Every epoch visits them in a new order and, if rows are longer, from a new offset. From the fourth
    epoch on the share `vary` of their tokens is replaced by others of the text, against overfitting.
    The windows `held` [h, window] are never taken.
    """

    def __init__(
        self, rows: Tensor, window: int, seed: int, vary: float = 0.0, beginning: Beginning = ()
    ) -> None:
        self.window, self.seed, self.vary = window, seed, vary
        self.beginning, self.text = beginning, room_in(window, beginning)
        self.one_text = len(rows) == 1
        count = rows.shape[1] // self.text if self.one_text else len(rows)
        held = min(max(round(HELD_SHARE * count), 1), HELD_MOST)
        if self.one_text:
            cut = rows.shape[1] - held * self.text
            self.rows, tail = rows[:, :cut], rows[0, cut:].view(held, self.text)
        else:
            self.rows, tail = rows[:-held], rows[-held:, : self.text]
        self.held = begun(tail, beginning).long()

    @property
    def idle(self) -> int:
        """The positions at a window's start whose predictions no loss counts."""
        return idle_predictions(self.beginning)

    @property
    def length(self) -> int:
        """The tokens of the text, with those held back."""
        return self.rows.numel() + len(self.held) * self.text

    @cached_property
    def row_tokens(self) -> float:
        """The mean number of tokens in a window; padding is negative."""
        if self.one_text:
            return self.window
        real = (self.rows[:, : self.text] >= 0).sum(1).double().mean()
        return float(real) + len(self.beginning)

    def __len__(self) -> int:
        """The windows of an epoch."""
        if not self.one_text:
            return len(self.rows)
        return max((self.rows.shape[1] - self.text) // self.text, 1)

    def take(self, first: int, count: int) -> Tensor:
        """The `count` windows from number `first` on: [count, window], int64."""
        epochs, places = zip(*(divmod(k, len(self)) for k in range(first, first + count)), strict=True)
        orders = {epoch: self._order(epoch) for epoch in dict.fromkeys(epochs)}
        found = []
        for k, epoch, place in zip(range(first, first + count), epochs, places, strict=True):
            order, offset = orders[epoch]
            pick = int(order[place])
            row, start = (0, pick * self.text) if self.one_text else (pick, 0)
            text = self.rows[row, start + offset : start + offset + self.text]
            found.append(self._varied(text, k) if self.vary and epoch >= PLAIN_READS else text)
        return begun(torch.stack(found), self.beginning).long()

    def _varied(self, text: Tensor, k: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 7_000_003 + k) % SEEDS)
        chosen = torch.rand(len(text), generator=generator) < self.vary
        flat = self.rows.reshape(-1)
        others = flat[torch.randint(len(flat), text.shape, generator=generator)]
        return torch.where(chosen, others, text)

    def _order(self, epoch: int) -> tuple[Tensor, int]:
        """The order of the windows in an epoch, and the offset at which each begins."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % SEEDS)
        order = torch.randperm(len(self), generator=generator)
        room = self.rows.shape[1] - (len(self) if self.one_text else 1) * self.text
        most = min(room + 1, self.text)
        return order, int(torch.randint(most, (), generator=generator))


def tokenize(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, most: int | None = None
) -> Tensor:
    """The tokens [n] (int32) of `documents`, or the first `most`, for which no more is read than
    needed."""
    found, count = list[Tensor](), 0
    for ids in tokenized(documents, tokenizer):
        found.append(torch.tensor(ids, dtype=torch.int32))
        count += len(ids)
        if most is not None and count >= most:
            break
    return torch.cat(found)[:most]


def text_stream(
    tokens: Tensor, window: int, seed: int, name: str, vary: float = 0.0, beginning: Beginning = ()
) -> Stream:
    """The stream of one text. Raises InputError if it is too short to be trained on and evaluated."""
    if len(tokens) < LEAST_WINDOWS * room_in(window, beginning):
        raise InputError(
            f"{name}: {len(tokens)} tokens, expected at least three windows of {window}; "
            "give more text, or take shorter windows"
        )
    return Stream(tokens[None], window, seed, vary, beginning)


def check_known(tokens: Iterable[Tensor], vocabulary: int | None, name: str) -> None:
    """Raise InputError for ids that a model with this `vocabulary` (None: unknown) does not have."""
    largest = max((int(part.max()) for part in tokens if part.numel()), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise InputError(
            f"{name}: the tokenizer makes token {largest} of it, and the model has {vocabulary} tokens; "
            "take the model's own tokenizer, or leave that out of the text"
        )


def interleaved(parts: list[Tensor]) -> Tensor:
    """The rows of all `parts`, mixed so that every stretch has some of each in proportion."""
    places = torch.cat([(torch.arange(len(part)) + 0.5) / len(part) for part in parts])
    return torch.cat(parts)[places.argsort(stable=True)]


def digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()
