"""A teacher that the student did not come from is told by numbers that both models have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from heal_models import QUIET, save_dense
from safetensors.torch import load_file, save_file

from blr.compressor.export.origin import open_checkpoint
from blr.compressor.heal.kinship import strangeness
from blr.compressor.heal.run import heal
from blr.compressor.heal.settings import HealOptions

Change = Callable[[torch.Tensor], torch.Tensor]
TABLE = "model.embed_tokens.weight"


def with_table(folder: Path, change: Change) -> Path:
    """A dense model whose embeddings are `change` of what the student's are."""
    dense = save_dense(folder / "other")
    tensors = load_file(dense / "model.safetensors")
    save_file({**tensors, TABLE: change(tensors[TABLE])}, dense / "model.safetensors")
    return dense


def said_of(student: Path, teacher: Path) -> str | None:
    return strangeness(open_checkpoint(student), open_checkpoint(teacher))


def random_like(table: torch.Tensor) -> torch.Tensor:
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_other_random_embeddings_are_told(scale: float, compressed: Path, tmp_path: Path) -> None:
    said = said_of(compressed, with_table(tmp_path, lambda table: scale * random_like(table)))
    assert said is not None and TABLE in said and "--teacher" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table,
        lambda table: table.bfloat16(),
        lambda table: table + 0.2 * table.std() * random_like(table),
    ],
    ids=["the same", "in another dtype", "trained further"],
)
def test_a_teacher_that_may_be_right_is_not(change: Change, compressed: Path, tmp_path: Path) -> None:
    assert said_of(compressed, with_table(tmp_path, change)) is None


def test_one_line_of_it_is_said_before_the_work(
    compressed: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = with_table(tmp_path, random_like)
    options = HealOptions(
        "compressed", "dense", window=16, batch=64, own_tokens=400, steps=1, device="cpu", check=False
    )
    for teacher, lines in ((dense, 0), (stranger, 1)):
        heal(compressed, teacher, tmp_path / f"healed-{lines}", options, QUIET)
        said = capsys.readouterr().err.splitlines()
        assert [line.startswith("blr: note: ") and TABLE in line for line in said] == [True] * lines
