"""Heals encoders: brings their sentence embeddings and hidden states close to the teacher's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from blr.compressor.base.errors import InputError
from blr.compressor.healing.student_and_teacher import TrainedPair
from blr.compressor.loading.sentences import Sentences
from blr.compressor.text.windows import Stream
from blr.kernels.training.losses import relative_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHT = 1.0  # default weight of the hidden states
HELD_BATCH = 32  # held-back sentences that are run at once
LEAST = 20  # different sentences that a text must have
BRIEF = 100 * LEAST  # sentences of a data set that are read to see whether it has as many
PADDING = -1  # fills rows of tokens behind the end of a sentence


@dataclass(frozen=True)
class Nearness:
    """Means over held-back sentences: 1 − cosine of the embeddings, and the error of hidden states."""

    distance: float
    states: float

    def judged(self, loss: str) -> float:
        """The number that training minimizes."""
        return self.distance


class Embedding:
    """The loss of an encoder, summed over sentences: 1 − cosine of the embeddings that `head` makes,
    plus `weight` times the relative error of the blocks' outputs."""

    def __init__(self, pair: TrainedPair, head: Sentences, weight: float | None) -> None:
        self.pair, self.head = pair, head
        self.weight = WEIGHT if weight is None else weight

    @staticmethod
    def scored(window: int) -> int:
        """The number of terms that a row adds to the loss: its one sentence."""
        return 1

    def __call__(self, rows: Tensor) -> Tensor:
        """The loss of `rows` [m, w] of token ids and padding; differentiable."""
        distance, states = self._distances(rows)
        return distance.sum() + self.weight * states.sum()

    @torch.no_grad()
    def merit(self, held: Tensor) -> Nearness:
        parts = [self._distances(rows) for rows in held.split(HELD_BATCH)]
        means = [torch.cat(found).double().mean().item() for found in zip(*parts, strict=True)]
        return Nearness(*means)

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For each sentence [m] the distance of its embedding and the error of its hidden states."""
        ids, mask = self._inputs(rows)
        ours = self._run(self.pair.student, ids, mask)
        with torch.no_grad():
            theirs = self._run(self.pair.teacher, ids, mask)
        found, wanted = (self.head.embed(states[-1].float(), mask) for states in (ours, theirs))
        real, missed = mask.float(), []  # ‖h − h'‖² / ‖h'‖², the mean over tokens and blocks
        for mine, dense in zip(ours[1:], theirs[1:], strict=True):
            missed.append((relative_errors(mine, dense) * real).sum(-1) / real.sum(-1))
        return 1 - cosine_similarity(found, wanted, dim=-1), torch.stack(missed).mean(0)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their mask; on a CPU without columns that are padding in all rows."""
        if rows.device.type == "cpu" and self.pair.device.type == "cpu":
            rows = rows[:, : int((rows != PADDING).sum(1).max())]
        rows = rows.to(self.pair.device, non_blocking=True)
        mask = (rows != PADDING).long()
        return rows.clamp_min(0), mask

    @staticmethod
    def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the embeddings and of every block."""
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return (*out.hidden_states[:-1], out.last_hidden_state)


def sentence_stream(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    head: Sentences,
    window: int,
    seed: int,
    name: str,
) -> Stream:
    """A text's distinct sentences as rows of `window` tokens at most. Raises InputError for few."""
    texts = [document.strip() for document in documents if document.strip()]
    texts = [text.lower() for text in texts] if head.lower else texts
    texts = list(dict.fromkeys(texts))  # one that is held back is nowhere else
    if len(texts) < LEAST:
        raise InputError(
            f"{name}: {len(texts)} different sentences, expected at least {LEAST}, one a line; "
            "give more text"
        )
    found = tokenizer(texts, truncation=True, max_length=window, return_attention_mask=False)
    rows = torch.full((len(texts), window), PADDING, dtype=torch.int32)
    for row, ids in zip(rows, found["input_ids"], strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return Stream(rows, window, seed)
