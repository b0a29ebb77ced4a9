"""Saves and loads the state of a training run; every save replaces it in the workspace's journal."""

import json
from dataclasses import dataclass, field
from typing import Annotated, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from blr.compressor.fitting.trainer import MOMENTS, Adam, Best
from blr.compressor.healing.student_and_teacher import TrainedPair
from blr.compressor.structures.packing import part_of
from blr.compressor.workspace.journal import Journal

OPTIMIZER, MASTER, BEST = "optimizer", "master", "best"
Moments = dict[str, Tensor]
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


class _OfText(TypedDict):  # as of `Objective.merit`
    kl: float
    student: float
    teacher: float
    variation: NotRequired[float]


class _OfSentences(TypedDict):  # as of `Embedding.merit`
    distance: float
    states: float


Merits = dict[str, _OfText | _OfSentences]
Natural = Annotated[int, Field(ge=0)]


class _Line(TypedDict):
    """A line of metrics.jsonl, which may have more keys."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]
    step: Natural
    tokens: Natural
    held: NotRequired[Merits]
    loss: NotRequired[float]


@dataclass
class State(Best):
    """The progress of a run. `worse` counts evaluations since the best one. `log` has the lines of
    metrics.jsonl; the losses of `loss_steps` steps since the last one add up to `loss_sum`. `texts` are
    the labels of the texts, in order."""

    __pydantic_config__ = STRICT
    step: Natural = 0
    best_step: Natural = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    before: Merits = field(default_factory=dict)
    best_merits: Merits = field(default_factory=dict)
    worse: Natural = 0
    loss_sum: float = 0.0
    loss_steps: Natural = 0
    done: bool = False
    log: list[_Line] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def rename(self, names: list[str]) -> None:
        """Give the texts these `names`, in their order; an earlier run may have used others."""
        called = dict(zip(self.texts or names, names, strict=False))
        held = [line["held"] for line in self.log if isinstance(line.get("held"), dict)]
        for merits in (self.before, self.best_merits, *held):
            found = {new: merits[old] for old, new in called.items() if old in merits}
            if len(found) == len(merits):  # else a state of an earlier version under other names
                merits.clear()
                merits.update(found)
        self.texts = names

    def judged(self, names: list[str]) -> bool:
        """Whether evaluations are recorded for texts of exactly these `names`."""
        merits = self.before, self.best_merits
        return all(found.keys() == set(names) for found in merits) and bool(self.log and self.values)

    def record(self) -> dict[str, object]:
        """Everything but the tensors, JSON-ready."""
        return {name: value for name, value in vars(self).items() if name != "values"}


RECORD = TypeAdapter(State)


def save_state(
    journal: Journal, key: str, state: State, pair: TrainedPair, optimizer: Adam, write: bool
) -> None:
    """Keep all that a resumed run needs. If masters are sharded all processes call it; the one with
    `write` set writes."""
    tensors = {f"{MASTER}.{n}": value for n, value in pair.joined(pair.values()).items()}
    tensors |= {f"{BEST}.{n}": value for n, value in pair.joined(state.values or {}).items()}
    for name, moments in zip(pair.masters, optimizer.moments(), strict=True):
        for part, value in moments.items():
            kept = value.to("cpu", copy=True)
            whole = pair.joined({name: kept})[name] if kept.dim() else kept
            tensors[f"{OPTIMIZER}.{part}.{name}"] = whole.contiguous()
    if write:
        journal.store(key, tensors, state.record())


def load_state(
    journal: Journal, key: str, pair: TrainedPair
) -> tuple[State, dict[str, Tensor], dict[str, Moments]] | None:
    """The state, the masters and the moments that `save_state` kept, each this process's part; None if
    there is nothing that fits."""
    found = journal.load(key)
    if found is None or not {f"{MASTER}.{name}" for name in pair.masters} <= found[0].keys():
        return None  # or of an earlier version, which trained less
    tensors = journal.tensors(key)
    try:
        state = RECORD.validate_json(json.dumps(found[1]))
    except ValidationError:  # of another version, or a hostile one
        return None
    if not _fit(pair, tensors):
        return None
    state.values = pair.parted(part_of(tensors, BEST)) or None
    moments: dict[str, Moments] = {}
    for label, tensor in part_of(tensors, OPTIMIZER).items():
        part, _, name = label.partition(".")
        own = pair.parted({name: tensor})[name] if tensor.dim() else tensor
        moments.setdefault(name, {})[part] = own
    return state, pair.parted(part_of(tensors, MASTER)), moments


def _fit(pair: TrainedPair, tensors: dict[str, Tensor]) -> bool:
    """Whether saved masters and moments have the names and shapes of what is trained."""
    whole = {name: m.shape for name, m in pair.masters.items() if name not in pair.slices}
    for label, tensor in tensors.items():
        (kind, _, name), part = label.partition("."), ""
        if kind == OPTIMIZER:
            part, _, name = name.partition(".")
            if part not in MOMENTS or name not in pair.masters:
                return False
        scalar = part == "step" and tensor.dim() == 0
        if name in whole and tensor.shape != whole[name] and not scalar:
            return False
    return True
