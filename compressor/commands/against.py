"""An output beside its dense model: how far apart they are on the same tokens and sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import of_text
from blr.compressor.commands.text_scores import ScoredWindow, TokenScores
from blr.compressor.output.loss import divergence, standard_error

FAR, CONTEXT = 5, 12  # tokens that are told of, and tokens shown before each
EXACT = 12  # decimals of divergences: an output in bfloat16 is 1e-5 nats away


@dataclass(frozen=True)
class Estimate:
    """A figure of a text and its standard error, which takes tokens for independent."""

    value: float
    error: float


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
    `ratio`, `kl` as of `output/loss.divergence`, the share of equal top-1 tokens (`agreement`), and the
    root mean square by which the right token's probability changed (`rms_dp`). `flips` count other top-1
    tokens: the dense model's was right (`lost`), the output's is (`gained`), or neither (`between`)."""

    perplexities: dict[str, Estimate]
    kl: dict[str, object]
    agreement: float
    flips: dict[str, int]
    rms_dp: float
    tokens: list[FarToken]


@dataclass(frozen=True)
class EmbeddingDistance:
    """Cosines of an encoder's embeddings with the dense model's, their mean and the one that 1 in 100
    is below; the dense model's correlation with the scores, and the output's with the dense model."""

    cosine_to_dense: float
    lowest_cosine: float
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
    known = [
        (tokenizer.get_vocab(), [tokenizer(text, verbose=False)["input_ids"] for text in texts])
        for tokenizer in tokenizers
    ]
    if known[0] != known[1]:
        raise InputError(f"{folders[1]}: a tokenizer that gives other tokens, expected one {expected}")


def distance(
    windows: Sequence[ScoredWindow], ids: Tensor, first: int, tokenizer: PreTrainedTokenizerBase
) -> Distance:
    """The distance on a text with `ids` [n], which begin at its token number `first`."""
    every = TokenScores.joined([scores for _, scores in windows])
    at = torch.cat([place + torch.arange(len(scores.kl)) for place, scores in windows])
    right, p, q = ids[at], (-every.dense_loss).exp(), (-every.loss).exp()
    same, hit, before = every.best == every.dense_best, every.best == right, every.dense_best == right
    flips = {"lost": before & ~hit, "gained": hit & ~before, "between": ~(same | hit | before)}

    def said(ids: Tensor) -> str:
        return str(tokenizer.decode(ids))

    far = list[FarToken]()
    for n in every.kl.topk(min(FAR, len(at))).indices.tolist():
        place = int(at[n])
        texts = said(ids[max(place - CONTEXT, 0) : place]), said(right[n])
        likeliest = said(every.dense_best[n]), said(every.best[n])
        pair = float(p[n]), float(q[n])
        far.append(FarToken(first + place, float(every.kl[n]), *texts, pair, likeliest))
    losses = {"dense": every.dense_loss, "output": every.loss, "ratio": every.loss - every.dense_loss}
    return Distance(
        {name: _exponential(loss.double()) for name, loss in losses.items()},
        divergence([row.kl for _, row in windows], [first + place for place, _ in windows], EXACT),
        float(same.double().mean()),
        {how: int(places.sum()) for how, places in flips.items()},
        float((q - p).square().mean().sqrt()),
        far,
    )


def _exponential(losses: Tensor) -> Estimate:
    """exp of the mean of losses; its error is that of the mean, times itself."""
    value = math.exp(float(losses.mean()))
    return Estimate(value, value * standard_error(losses))
