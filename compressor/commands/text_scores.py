"""How likely models find the tokens of a text, and how far two of them are from each other there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blr.compressor.base.errors import InputError, NumericsError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.context import context_of
from blr.compressor.commands.dense_states import DenseStates, predicting
from blr.compressor.healing.objective import Readout, Replies, chunks
from blr.compressor.loading.tokenizer import check_ids
from blr.compressor.text.reading import Beginning, begun, room_in

MAX_LOSS = 700  # nats; exp of more is beyond a float, and no vocabulary has so many tokens


class Likelihoods(NamedTuple):
    """Of rows of logits [n, v]: these less the largest of their row, the logarithm of the sum of their
    exponentials, the losses of the text's tokens and the likeliest tokens."""

    logits: Tensor
    log_sum: Tensor
    loss: Tensor
    best: Tensor


class TokenScores(NamedTuple):
    """For tokens [n], or windows of them [m, w]: their losses in nats and the likeliest tokens. Of two
    models also those of the dense one (`dense_loss`, `dense_best`) and KL(dense ‖ output)."""

    loss: Tensor
    best: Tensor
    dense_loss: Tensor
    dense_best: Tensor
    kl: Tensor

    @staticmethod
    def joined(found: Sequence[TokenScores]) -> TokenScores:
        """Of all their tokens."""
        return TokenScores(*map(torch.cat, zip(*found, strict=True)))


ScoredWindow = tuple[int, TokenScores]  # of the tokens of a window from this place in the text on


def likelihoods(logits: Tensor, targets: Tensor) -> Likelihoods:
    """In float32. The largest logit is taken off first: sums of what is left are exact enough for
    differences of 1e-7 nats."""
    most, best = logits.float().max(-1, keepdim=True)
    shifted = logits.float() - most
    log_sum = shifted.exp().sum(-1).log()
    return Likelihoods(shifted, log_sum, log_sum - _at(shifted, targets), best[:, 0])


def divergences(dense: Likelihoods, ours: Likelihoods) -> Tensor:
    """KL(dense ‖ ours) of every row [n]: 0 for equal ones."""
    p = (dense.logits - dense.log_sum[:, None]).exp_()
    gap = (dense.logits - ours.logits).masked_fill_(p == 0, 0.0)  # of -inf and -inf
    return (p.mul_(gap).sum(-1) - (dense.log_sum - ours.log_sum)).clamp_min(0.0)


def scores(
    hidden: Tensor, head: Readout, targets: Tensor, dense: tuple[Tensor, Readout] | None
) -> TokenScores:
    """Scores of the tokens `targets` [n] by the states before them [n, d], logits a few at a time."""
    parts = list[TokenScores]()
    for at in chunks(hidden, head.weight):
        ours = likelihoods(head.logits(hidden[at]), targets[at])
        theirs = ours if dense is None else likelihoods(dense[1].logits(dense[0][at]), targets[at])
        kl = torch.zeros_like(ours.loss) if dense is None else divergences(theirs, ours)
        parts.append(TokenScores(ours.loss, ours.best, theirs.loss, theirs.best, kl))
    return TokenScores.joined(parts)


def _at(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(-1, targets[:, None])[:, 0]


def divided(model: PreTrainedModel, ids: Tensor, beginning: Beginning) -> Replies:
    """A decoder in two parts, tried on the beginning of a text."""
    return Replies(model, begun(ids[None, :1], beginning).to(model.device), blocks=False)


@torch.inference_mode()
def text_scores(
    model: PreTrainedModel,
    ids: Tensor,
    window: int,
    stride: int,
    batch: int,
    progress: Progress,
    beginning: Beginning = (),
    dense: DenseStates | None = None,
) -> list[ScoredWindow]:
    """Scores of the tokens `ids` [n] in windows every `stride` tokens, beside those of a `dense` model.

    A token is scored in the first window that has something before it. Raises InputError for a window
    that does not fit or unknown ids, NumericsError for a loss that is not finite.
    """
    limit = context_of(model.config.to_dict())
    if window > limit:
        remedy = "take a shorter one, or leave --window out"
        raise InputError(f"window {window} is longer than the model's context of {limit}; {remedy}")
    check_ids(model, torch.cat([ids.new_tensor(beginning), ids]))
    room, found = room_in(window, beginning), list[ScoredWindow]()
    stride = min(stride, room)
    starts = list(range(0, max(len(ids) - room, 0) + 1, stride))
    if starts[-1] + room < len(ids):
        starts.append(starts[-1] + stride)
    groups = [starts[n : n + batch] for n in range(0, len(starts), batch)]
    reader = divided(model, ids, beginning)
    with progress.layers(len(groups), "evaluating") as advance:
        for group in groups:
            advance("")
            for rows, fresh, places in _stack(ids, group, room, stride, bool(beginning)):
                rows = begun(rows, beginning).to(model.device)
                theirs = None if dense is None else dense.states(rows, fresh)
                states, targets = predicting(reader, rows, fresh), rows[:, -fresh:].flatten()
                parts = (x.view(-1, fresh).cpu() for x in scores(states, reader.head, targets, theirs))
                found += zip(places, map(TokenScores._make, zip(*parts, strict=True)), strict=True)
    every = TokenScores.joined([window for _, window in found])
    for loss, whose in ((every.loss, ""), (every.dense_loss, " of the dense model")):
        if not (mean := float(loss.double().mean())) < MAX_LOSS:  # NaN is not
            raise NumericsError(
                f"the mean negative log-likelihood{whose} is {mean:g}: expected a finite number below "
                f"{MAX_LOSS}; evaluate in --dtype float32, or repair the checkpoint"
            )
    return found


def _stack(
    ids: Tensor, starts: list[int], room: int, stride: int, begins: bool
) -> list[tuple[Tensor, int, list[int]]]:
    """Rows of equal length and count of new tokens together, as ([m, w], new, places of the first new
    ones)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for start in starts:
        length = min(room, len(ids) - start)
        alone = start == 0 or stride == room
        fresh = length - (not begins) if alone else length - (room - stride)
        if fresh > 0:
            groups.setdefault((length, fresh), []).append(start)
    return [
        (torch.stack([ids[s : s + n] for s in found]), fresh, [s + n - fresh for s in found])
        for (n, fresh), found in groups.items()
    ]
