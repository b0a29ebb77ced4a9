"""Describes the computation of one token as data: phases that read and write named buffers.

Buffers are [rows, width]: "x" is the residual stream, "qkv" the raw projections, "heads" the attention's
result, "z0" the results of first stages, "inner" the gated
activations, "logits". `memory.py` gives their dtypes; `bind.py` runs phases by Triton kernels or in
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from blr.compressor.modeling.stages import LayerStage, Packed
from blr.kernels.decode.gemv.segments import SEVERAL

LARGE = 300e6  # bytes of a layer of plain weights


@dataclass(frozen=True)
class Columns:
    """`width` columns of the buffer `name`, from `start` on."""

    name: str
    width: int
    start: int = 0


NOWHERE = Columns("", 0)


@dataclass(frozen=True)
class StagePart:
    """One stage of a launch, from one slot into another. first: the first stage of its correction.
    order: bits and group of the packed weights that read the target, if no others do."""

    stage: LayerStage
    source: Columns
    target: Columns
    first: StagePart | None = None
    order: tuple[int, int] | None = None

    def slots(self) -> list[Columns]:
        return [self.source, self.target] + ([] if self.first is None else self.first.slots())


@dataclass(frozen=True)
class Heads:
    """The settings of one layer's attention. width: of a head. q_gain, k_gain: [width], of norms of
    queries and keys, or None. sinks: [Hq] or None, as of `attention/reference.py`."""

    layer: int
    width: int
    scale: float
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    window: int | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Phase:
    """One step in the computation of a token.

    kind: "embed" (token to `target`), "stages" (`parts` in one launch), "dual" (act(first part) ⊙ second
    part), "gate" (act(first half of `source`) ⊙ second half), "norm", "module" (calls `module`),
    "attention", "experts" (of the logits in `source`), "choose" (takes the token of the largest logit).
    gain, eps: of the RMS norm before. add: add the result to `target`.
    """

    name: str
    kind: str
    parts: tuple[StagePart, ...] = ()
    source: Columns = NOWHERE
    target: Columns = NOWHERE
    gain: Tensor | None = None
    eps: float = 0.0
    add: bool = False
    activation: str = ""
    heads: Heads | None = None
    module: nn.Module | None = None
    weight: Tensor | None = None
    routing: tuple[int, bool] | None = None

    @property
    def bytes(self) -> int:
        """The bytes of weights that one token reads in this phase, without the cache."""
        if self.weight is not None:  # the embedding, of which one row is read
            return self.weight.shape[1] * self.weight.element_size()
        own = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        gain = [] if self.gain is None else [self.gain]
        return sum(t.nbytes for t in (*own, *gain)) + sum(part.stage.bytes for part in self.parts)


@dataclass
class TokenPlan:
    """The phases of one token in order, and the width of every buffer."""

    phases: list[Phase] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        stages = [part.stage for phase in self.phases for part in phase.parts]
        return not any(isinstance(stage.w, Packed) for stage in stages)

    @property
    def least_rows(self) -> int:
        """As of how many rows one row at least is computed: tensor cores are as fast with large plain
        layers, and with them a row has the same numbers beside others."""
        layers = sum(phase.kind == "attention" for phase in self.phases)
        size = sum(phase.bytes for phase in self.phases)
        return SEVERAL if self.plain and size >= LARGE * layers else 1

    def add(self, phase: Phase) -> None:
        """Append a phase and widen the buffers for it."""
        slots = [slot for part in phase.parts for slot in part.slots()]
        for slot in (*slots, phase.source, phase.target):
            if slot is not NOWHERE:
                width = self.buffers.get(slot.name, 0)
                self.buffers[slot.name] = max(width, slot.start + slot.width)
        self.phases.append(phase)
