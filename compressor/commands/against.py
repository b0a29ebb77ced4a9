"""An output beside its dense model: how far apart they are on the same tokens, sentences and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import of_text
from blr.compressor.commands.text_scores import TokenScores
from blr.compressor.output.loss import divergence, percentiles, standard_error

FAR, CONTEXT = 5, 12  # tokens that are told of, and tokens shown before each
EXACT = 12  # decimals of divergences: an output in bfloat16 is 1e-5 nats away


@dataclass(frozen=True)
class Estimate:
    """A figure of a text and its standard error, which takes tokens for independent."""

    value: float
    error: float


@dataclass(frozen=True)
class Flips:
    """Places where the likeliest token is another: the dense model's was right (`lost`), the output's is
    (`gained`), or neither (`between`)."""

    lost: int
    gained: int
    between: int


@dataclass(frozen=True)
class FarToken:
    """Token number `token` of a text, behind the text `before` it: its probabilities by the dense model
    and by the output, and what they find the likeliest."""

    token: int
    kl: float
    before: str
    text: str
    probabilities: tuple[float, float]
    likeliest: tuple[str, str]


@dataclass(frozen=True)
class Distance:
    """An output beside its dense model on a text: perplexities of `dense` and `output` and their
    `ratio`, `kl` as of `output/loss.divergence`, and the root mean square by which the right token's
    probability changed (`rms_dp`)."""

    perplexities: dict[str, Estimate]
    kl: dict[str, Any]
    agreement: Estimate
    flips: Flips
    rms_dp: float
    tokens: list[FarToken]


@dataclass(frozen=True)
class EmbeddingDistance:
    """Cosines of an encoder's embeddings with the dense model's, their mean and the one that 1 in 100
    is below; the dense model's correlation with the scores, and the output's with the dense model."""

    cosine: Estimate
    lowest: float
    dense_spearman: float
    spearman_to_dense: float


def check_alike(
    folders: Sequence[Path], tokenizers: Sequence[PreTrainedTokenizerBase], texts: Sequence[str]
) -> None:
    """Raise InputError unless an output and its dense model, in this order, read all text alike."""
    ours, dense = (of_text(read_config(folder)).get("vocab_size") for folder in folders)
    expected = f"as of {folders[0]}; compare an output with the model that it was made from"
    if ours != dense:
        raise InputError(f"{folders[1]}: a vocabulary of {dense} tokens, expected {ours} {expected}")
    known = [tokenizer.get_vocab() for tokenizer in tokenizers]
    ids = [[tokenizer(text, verbose=False)["input_ids"] for text in texts] for tokenizer in tokenizers]
    if known[0] != known[1] or ids[0] != ids[1]:
        raise InputError(f"{folders[1]}: a tokenizer that gives other tokens, expected one {expected}")


def distance(
    found: Sequence[TokenScores],
    places: Sequence[int],
    ids: Tensor,
    first: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Distance:
    """The distance on a text with `ids` [n], which begin at its token number `first`. Windows of scores
    begin at `places` among the ids."""
    rows = [row for part in found for row in part.rows()]
    every = TokenScores.joined(rows)
    at = torch.cat([torch.arange(n, n + len(row.loss)) for n, row in zip(places, rows, strict=True)])
    right, p, q = ids[at], (-every.dense_loss).exp(), (-every.loss).exp()
    same, hit, before = every.best == every.dense_best, every.best == right, every.dense_best == right
    flips = Flips(*(int(x.sum()) for x in (before & ~hit, hit & ~before, ~(same | hit | before))))

    def said(ids: Tensor) -> str:
        return str(tokenizer.decode(ids))

    far = [
        FarToken(
            token=first + place,
            kl=float(every.kl[n]),
            before=said(ids[max(place - CONTEXT, 0) : place]),
            text=said(right[n]),
            probabilities=(float(p[n]), float(q[n])),
            likeliest=(said(every.dense_best[n]), said(every.best[n])),
        )
        for n in every.kl.topk(min(FAR, len(at))).indices.tolist()
        for place in (int(at[n]),)
    ]
    losses = {"dense": every.dense_loss, "output": every.loss, "ratio": every.loss - every.dense_loss}
    return Distance(
        {name: _exponential(loss) for name, loss in losses.items()},
        divergence([row.kl for row in rows], [first + n for n in places], EXACT),
        _mean(same),
        flips,
        float((q - p).square().mean().sqrt()),
        far,
    )


def embedding_distance(cosines: Tensor, dense_spearman: float, to_dense: float) -> EmbeddingDistance:
    """Of cosines [n] of embeddings with the dense model's, and rank correlations in percent."""
    return EmbeddingDistance(_mean(cosines), percentiles(cosines, [1])[0], dense_spearman, to_dense)


def _mean(values: Tensor) -> Estimate:
    return Estimate(float(values.double().mean()), standard_error(values.double()))


def _exponential(losses: Tensor) -> Estimate:
    """exp of the mean of losses; its error is that of the mean, times itself."""
    mean = _mean(losses)
    value = float(torch.tensor(mean.value, dtype=torch.float64).exp())
    return Estimate(value, value * mean.error)
