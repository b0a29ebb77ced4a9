"""The state of a training run in the journal of its workspace, replaced as a whole at every save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr.compressor.checkpoint.journal import Journal
from blr.compressor.heal.optimizer import Moments, moments_of
from blr.compressor.heal.pair import Pair

OPTIMIZER, MASTER, BEST = "optimizer.", "master.", "best."


@dataclass
class State:
    """Where a run is: `step` steps and `seconds` of training are done; `best` is the merit judged best
    and `best_step` when that was; `values` are the masters then. `worse` counts evaluations since.
    `log` is what metrics.jsonl will say, no times; `texts` what the texts are called, in their order."""

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
    texts: list[str] = field(default_factory=list)

    def rename(self, names: list[str]) -> None:
        """Call the texts by these `names`, in their order: earlier they may have had others."""
        called = dict(zip(self.texts or names, names, strict=False))
        held = [line["held"] for line in self.log if "held" in line]
        for merits in (self.before, self.best_merits, *held):
            found = {new: merits[old] for old, new in called.items() if old in merits}
            if len(found) == len(merits):  # else a state of an earlier version under other names
                merits.clear()
                merits.update(found)
        self.texts = names

    def record(self) -> dict[str, Any]:
        """All but the tensors, JSON-ready."""
        return {name: value for name, value in vars(self).items() if name != "values"}


def save_state(
    journal: Journal, key: str, state: State, pair: Pair, optimizer: Any, write: bool
) -> None:
    """Keep all that a resumed run needs to go on as if it had never stopped.

    All processes call it where masters are shared out; `write`: whether this one writes.
    """
    tensors = {f"{MASTER}{n}": value for n, value in pair.joined(pair.values()).items()}
    for name, value in pair.joined(state.values or {}).items():
        tensors[f"{BEST}{name}"] = value
    for name, moments in moments_of(optimizer, pair.masters).items():
        for part, value in moments.items():
            kept = torch.as_tensor(value).detach().to("cpu", copy=True)
            whole = pair.joined({name: kept})[name] if kept.dim() else kept
            tensors[f"{OPTIMIZER}{part}.{name}"] = whole.contiguous()
    if write:
        journal.store(key, tensors, state.record())


def load_state(
    journal: Journal, key: str, pair: Pair
) -> tuple[State, dict[str, Tensor], dict[str, Moments]] | None:
    """What `save_state` kept, this process's part of it: the state, masters and moments by name; None
    if there is nothing."""
    found = journal.load(key)
    if found is None or not {f"{MASTER}{name}" for name in pair.masters} <= found[0].keys():
        return None  # or of an earlier version, which trained less
    tensors = journal.tensors(key)
    state = State(**found[1])
    state.values = pair.parted(_named(tensors, BEST)) or None
    moments: dict[str, Moments] = {}
    for label, tensor in _named(tensors, OPTIMIZER).items():
        part, _, name = label.partition(".")
        own = pair.parted({name: tensor})[name] if tensor.dim() else tensor
        moments.setdefault(name, {})[part] = own
    return state, pair.parted(_named(tensors, MASTER)), moments


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
