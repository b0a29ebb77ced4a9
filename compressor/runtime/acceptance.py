"""Which drafts are accepted, so that all tokens follow the model that wants them."""

import torch
from torch import Tensor


def agreed(hits: Tensor) -> Tensor:
    """How many drafts [B] come before the first that is no hit. hits: [drafts, B]."""
    return hits.long().cumprod(0).sum(0)


def accept(
    wanted: Tensor, likely: Tensor, drafts: Tensor, chances: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts [k, B] so that all tokens follow `wanted` [k + 1, B, vocab], whatever `likely`
    [k, B, vocab] they were drawn from: one of probability q, wanted with p, is accepted with p / q, else
    a token is drawn from what p has more than q. chances: [k, B], uniform; noise: [B, vocab],
    exponential variates.

    Returns tokens [k + 1, B] and how many drafts [B] come before the drawn one.
    """
    index = drafts[..., None]
    count = agreed(chances * likely.gather(-1, index)[..., 0] < wanted[:-1].gather(-1, index)[..., 0])
    at = count[None, :, None].expand(1, *noise.shape)
    p = wanted.gather(0, at)[0]
    q = torch.cat((likely, torch.zeros_like(likely[:1]))).gather(0, at)[0]
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # equal but for rounding
    drawn = (rest / noise).argmax(-1)
    tokens = torch.cat((drafts, drawn[None])).scatter(0, count[None], drawn[None])
    return tokens, count
