"""Greedy tokens by transformers with structured layers as plain products, where no two logits tie.

Rounding differs between devices, batches and kernels: tokens can be demanded to be the same only
where the best logit leads by more than that. Prompts are chosen by the reference's own lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from references import plain_products
from torch import Tensor

LEAD = 5e-5  # of the best logit, in standard deviations; float32 results differ by less than 1e-5
DISTINCT = 6  # different tokens at least: a constant continuation proves little


@dataclass(frozen=True)
class Prompt:
    """Token ids, the tokens that follow, and by how much the best logit leads at least."""

    ids: list[int]
    tokens: list[int]
    lead: float

    @property
    def distinct(self) -> int:
        """Different tokens among those that follow."""
        return len(set(self.tokens))


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[B, T] ids with zeros on the left, and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def follow(model: Any, rows: Sequence[Sequence[int]], new: int) -> list[Prompt]:
    """`rows` in one batch padded on the left, each with the `new` tokens that follow."""
    ids, mask = (tensor.to(model.device) for tensor in left_padded(rows))
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with plain_products(model):
        found = model.generate(
            ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
        )
    logits = torch.stack(found.logits, 1).float()  # [B, new, vocab]
    best = logits.topk(2).values
    leads = ((best[..., 0] - best[..., 1]) / logits.std(-1)).amin(1).tolist()
    tokens = found.sequences[:, ids.shape[1] :].tolist()
    return [Prompt(list(row), *rest) for row, *rest in zip(rows, tokens, leads, strict=True)]


def separated(model: Any, candidates: Sequence[Sequence[Sequence[int]]], new: int) -> list[Prompt]:
    """Of each group of candidates the prompt with the most varied continuation of those that never
    come near a tie.

    Raises ValueError for a group that has none, or none but repetitions.
    """
    found = iter(follow(model, [row for group in candidates for row in group], new))
    chosen = []
    for number, group in enumerate(candidates):
        safe = [prompt for prompt in [next(found) for _ in group] if prompt.lead > LEAD]
        best = max(safe, key=lambda prompt: prompt.distinct, default=None)
        if best is None or best.distinct < DISTINCT:
            raise ValueError(f"prompt {number}: no candidate whose tokens are varied and beyond doubt")
        chosen.append(best)
    return chosen
