"""The state of a training run in the journal of its workspace, replaced as a whole at every save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr.compressor.checkpoint.journal import Journal

OPTIMIZER, MASTER, BEST = "optimizer.", "master.", "best."


@dataclass
class State:
    """Where a run is: `step` steps and `seconds` of training are done; `best` is the merit judged best
    and `best_step` when that was; `values` are the masters then. `worse` counts evaluations since.
    `log` is what metrics.jsonl will say."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    best: float = float("inf")
    best_step: int = 0
    best_merits: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Tensor] | None = None
    worse: int = 0
    done: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """All but the tensors, JSON-ready."""
        return {name: value for name, value in vars(self).items() if name != "values"}


def save_state(
    journal: Journal, key: str, state: State, masters: dict[str, Tensor], optimizer: Any
) -> None:
    """Keep all that a resumed run needs to go on as if it had never stopped."""
    tensors = {f"{MASTER}{name}": value for name, value in masters.items()}
    for name, value in (state.values or {}).items():
        tensors[f"{BEST}{name}"] = value
    for index, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            kept = torch.as_tensor(value).detach().cpu().clone()
            tensors[f"{OPTIMIZER}{index}.{name}"] = kept.contiguous()
    journal.store(key, tensors, state.record())


def load_state(journal: Journal, key: str) -> tuple[State, dict[str, Tensor], dict[int, Any]] | None:
    """What `save_state` kept: the state, masters and moments by index; None if there is nothing."""
    found = journal.load(key)
    if found is None:
        return None
    tensors = journal.tensors(key)
    state = State(**found[1])
    best = {n.removeprefix(BEST): t for n, t in tensors.items() if n.startswith(BEST)}
    state.values = best or None
    moments: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            index, _, part = name.removeprefix(OPTIMIZER).partition(".")
            moments.setdefault(int(index), {})[part] = tensor
    masters = {n.removeprefix(MASTER): t for n, t in tensors.items() if n.startswith(MASTER)}
    return state, masters, moments
