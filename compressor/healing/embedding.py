"""Healing of encoders: sentence embeddings and hidden states as close to the teacher's as they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from blr.compressor.base.errors import InputError
from blr.compressor.healing.student_and_teacher import TrainedPair
from blr.compressor.loading.sentences import Sentences
from blr.compressor.text.windows import Stream
from blr.kernels.training.distance.op import relative_errors

WEIGHT = 1.0  # of the hidden states, where none is asked for
HELD_BATCH = 32  # sentences at once
LEAST = 20  # sentences of a text
BRIEF = 100 * LEAST  # of a data set, which repeats some, that are read to see that it has as many
PADDING = -1  # in rows of tokens, behind the end of a sentence


@dataclass(frozen=True)
class Nearness:
    """Of held-back sentences: mean 1 − cosine of the embeddings, and the hidden states' error."""

    distance: float
    states: float

    def judged(self, loss: str) -> float:
        """What is minimized."""
        return self.distance


class Embedding:
    """Σ over sentences of 1 − cosine of the embeddings that `head` makes and `weight` times the
    relative error of the blocks' outputs."""

    def __init__(self, pair: TrainedPair, head: Sentences, weight: float | None) -> None:
        self.pair, self.head = pair, head
        self.weight = WEIGHT if weight is None else weight

    @staticmethod
    def scored(window: int) -> int:
        """What the loss of a row sums over: its one sentence."""
        return 1

    def __call__(self, rows: Tensor) -> Tensor:
        """Differentiable; `rows` [m, w] of token ids and padding."""
        distance, states = self._distances(rows)
        return distance.sum() + self.weight * states.sum()

    @torch.no_grad()
    def merit(self, held: Tensor) -> Nearness:
        parts = [self._distances(rows) for rows in held.split(HELD_BATCH)]
        means = [torch.cat(found).double().mean().item() for found in zip(*parts, strict=True)]
        return Nearness(*means)

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[m] of each sentence's embedding and of its hidden states."""
        ids, mask = self._inputs(rows)
        ours = self._run(self.pair.student, ids, mask)
        with torch.no_grad():
            theirs = self._run(self.pair.teacher, ids, mask)
        found, wanted = (self.head.embed(states[-1].float(), mask) for states in (ours, theirs))
        return 1 - cosine_similarity(found, wanted, dim=-1), _missed(ours, theirs, mask)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their mask; on the CPU without the columns that are padding in all rows."""
        if rows.device.type == "cpu" and self.pair.device.type == "cpu":
            rows = rows[:, : int((rows != PADDING).sum(1).max())]
        rows = rows.to(self.pair.device, non_blocking=True)
        mask = (rows != PADDING).long()
        return rows.clamp_min(0), mask

    @staticmethod
    def _run(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """What leaves the embeddings and every block."""
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return (*out.hidden_states[:-1], out.last_hidden_state)


def _missed(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """[m]: ‖h − h'‖² / ‖h'‖², mean over a sentence's tokens and the blocks."""
    kept, found = mask.float(), []
    for mine, wanted in zip(ours[1:], theirs[1:], strict=True):
        found.append((relative_errors(mine, wanted) * kept).sum(-1) / kept.sum(-1))
    return torch.stack(found).mean(0)


def sentence_stream(
    documents: Any, tokenizer: Any, head: Sentences, window: int, seed: int, name: str
) -> Stream:
    """The sentences of a text as rows of at most `window` tokens. Raises InputError for too few."""
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
