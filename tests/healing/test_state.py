"""The state of a training run may be anybody's when it is read again: it fits, or there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blr.compressor.healing.state import State, load_state
from blr.compressor.workspace.journal import Journal

pytestmark = pytest.mark.fast

KEY = "a" * 64
FIGURES = {"self": {"kl": 1.0, "student": 2.0, "teacher": 1.5}}
LINE = {"step": 0, "tokens": 0, "seconds": 0.0, "held": FIGURES}
RECORD = State(
    step=3, seconds=2.5, before=FIGURES, best=1.0, best_merits=FIGURES, log=[LINE], texts=["self"]
).record()
TENSORS = {
    **{name: torch.zeros(2, 3) for name in ("master.w", "best.w")},
    **{f"optimizer.{name}.w": torch.zeros(2, 3) for name in ("exp_avg", "exp_avg_sq")},
    "optimizer.step.w": torch.zeros(()),
}


def load(folder: Path, record: Any, tensors: dict[str, torch.Tensor]) -> Any:
    masters = {"w": torch.ones(2, 3)}
    pair: Any = SimpleNamespace(masters=masters, slices={}, parted=lambda found: found)
    Journal(folder).store(KEY, tensors, record)
    return load_state(Journal(folder), KEY, pair)


def test_what_was_saved_is_there(tmp_path: Path) -> None:
    state, masters, moments = load(tmp_path, RECORD, TENSORS)
    assert state.record() == RECORD and state.judged(["self"]) and not state.judged(["other"])
    assert masters["w"].shape == (2, 3) and moments["w"].keys() == {"step", "exp_avg", "exp_avg_sq"}


RECORDS: dict[str, dict[str, Any]] = {
    "step as text": {"step": "3"},
    "step below zero": {"step": -1},
    "step as boolean": {"step": True},
    "seconds as list": {"seconds": [1]},
    "seconds without end": {"seconds": float("inf")},
    "best as text": {"best": "good"},
    "worse as float": {"worse": 0.5},
    "done as number": {"done": 1},
    "figures as list": {"before": [1]},
    "figures of another kind": {"before": {"self": {"kl": 1.0}}},
    "figures as text": {"best_merits": {"self": {"kl": "1", "student": 2.0, "teacher": 1.5}}},
    "log as table": {"log": {}},
    "lines as text": {"log": ["x"]},
    "lines without steps": {"log": [{"held": FIGURES}]},
    "lines of other figures": {"log": [{**LINE, "held": {"self": 3}}]},
    "texts as numbers": {"texts": [1]},
    "more": {"mine": 1},
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_no_training_wrote_is_none(case: str, tmp_path: Path) -> None:
    assert load(tmp_path, {**RECORD, **RECORDS[case]}, TENSORS) is None


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("master.w", (3, 2)),
        ("best.w", (6,)),
        ("optimizer.exp_avg.w", (1,)),
        ("optimizer.step.w", (7,)),
        ("optimizer.step.v", ()),
        ("optimizer.other.w", (2, 3)),
    ],
)
def test_tensors_of_something_else_are_none(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    assert load(tmp_path, RECORD, {**TENSORS, name: torch.zeros(shape)}) is None
