"""What computes one token, as data: phases that read and write named buffers.

Buffers are [rows, width]: "x" is the residual stream, "qkv" the raw projections, "heads" the
attention's result, "z0" a first stage's results, "pivots" those of both stages of pivot rows, "inner"
the gated activations, "logits". `memory.py` says in which dtype; `bind.py` runs phases, with Triton
kernels or in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from blr.compressor.modeling.stages import LayerStage
from blr.kernels.layers.pivoted.places import Places


@dataclass(frozen=True)
class Columns:
    """Columns `start` … of the buffer `name`, `width` of them."""

    name: str
    width: int
    start: int = 0


NOWHERE = Columns("", 0)


@dataclass(frozen=True)
class StagePart:
    """One stage of a launch, from one slot into another. first: that of its correction. order: bits and
    group of the packed weights that alone read the target, if there are such."""

    stage: LayerStage
    source: Columns
    target: Columns
    first: StagePart | None = None
    order: tuple[int, int] | None = None

    def slots(self) -> list[Columns]:
        """Where it reads and writes."""
        return [self.source, self.target] + ([] if self.first is None else self.first.slots())


@dataclass(frozen=True)
class Heads:
    """What the attention of one layer needs to know. width: of a head. gains: [width] or None."""

    layer: int
    width: int
    scale: float
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    window: int | None


@dataclass(frozen=True)
class Phase:
    """One step of a token.

    kind: "embed" (token to `target`), "stages" (`parts` in one launch), "dual" (act(first part) ⊙
    second part), "gate" (act(first half of `source`) ⊙ second half), "gather" (`places` of `source`,
    with an activation then as "gate"), "norm", "module" (calls `module`), "attention", "choose" (token
    of the largest logit; ends the token).
    gain, eps: of the RMS norm of the input. add: the result is added to `target`.
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
    places: Places | None = None

    @property
    def bytes(self) -> int:
        """Bytes of weights that one token reads in this phase (the cache not counted)."""
        if self.places is not None:
            return self.places.bytes
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

    def add(self, phase: Phase) -> None:
        """Append a phase and widen the buffers for it."""
        slots = [slot for part in phase.parts for slot in part.slots()]
        for slot in (*slots, phase.source, phase.target):
            if slot is not NOWHERE:
                width = self.buffers.get(slot.name, 0)
                self.buffers[slot.name] = max(width, slot.start + slot.width)
        self.phases.append(phase)
