"""Sentences are embedded without a graph of gradients, which would hold every batch's activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blr.compressor import evaluate
from blr.compressor.progress import Progress

pytestmark = pytest.mark.fast


def test_no_gradients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def embed(model: Any, tokenizer: Any, sentences: list[str], *_: Any) -> torch.Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return torch.tensor([[float(len(s)), 1.0] for s in sentences])

    monkeypatch.setattr(evaluate, "embed", embed)
    pairs = [("a", "b", 3.0), ("a", "bbb", 2.0), ("a", "bbbbbbb", 1.0)]
    found = evaluate.sts_spearman(None, None, pairs, 2, Progress(quiet=True))
    assert seen == [True] and found.spearman == pytest.approx(100)
