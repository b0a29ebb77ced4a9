"""Sentences are embedded without a graph of gradients, which would hold every batch's activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blr.compressor.base.errors import InputError
from blr.compressor.commands import evaluate

pytestmark = pytest.mark.fast

ROWS = "a,b,3.0\nc,d,2.0\n"


@pytest.mark.parametrize("score", ["inf", "-inf", "Infinity", "nan", " NaN", "1e999"])
def test_a_first_row_whose_score_is_no_finite_number_is_no_header(score: str, tmp_path: Path) -> None:
    """It would be left out without a word."""
    (tmp_path / "sts.csv").write_text(f"x,y,{score}\n{ROWS}")
    with pytest.raises(InputError, match=r"row 1 is .*expected sentence, sentence, score"):
        evaluate.read_pairs(tmp_path / "sts.csv")


@pytest.mark.parametrize("header", ["", "first,second,score\n"])
def test_a_header_is_left_out(header: str, tmp_path: Path) -> None:
    (tmp_path / "sts.csv").write_text(header + ROWS)
    assert evaluate.read_pairs(tmp_path / "sts.csv") == [("a", "b", 3.0), ("c", "d", 2.0)]


def test_no_gradients_are_kept() -> None:
    seen: list[bool] = []

    def embed(sentences: list[str]) -> torch.Tensor:
        seen.append(torch.is_inference_mode_enabled())
        return torch.tensor([[float(len(s)), 1.0] for s in sentences])

    pairs = [("a", "b", 3.0), ("a", "bbb", 2.0), ("a", "bbbbbbb", 1.0)]
    found, _ = evaluate.sts_spearman(embed, pairs)
    assert seen == [True] and found == pytest.approx(100)
